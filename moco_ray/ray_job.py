"""What a process knows of the Ray job that it is the driver of, without asking Ray. Not here: how a job is submitted (submit.py)."""

import json
import os

CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray 2.60 tells it to a driver, and to what that starts, in this variable alone


def own_job() -> str:
    """The submission id; "" outside a job that was submitted."""
    try:
        found = json.loads(os.environ.get(CONFIG, "{}"))["metadata"]["job_submission_id"]
    except (ValueError, LookupError, TypeError):
        return ""
    return found if isinstance(found, str) else ""


def folder_removed() -> str:
    """That the working folder is there no more, with the cure; "" if it is there. Without one torch cannot even be imported."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return f"the job's folder was removed below it, {_UNPACKED}" if own_job() else "the folder that this command runs in was removed; change into one that is there"
    return ""


def folder_emptied() -> str:
    """That the working folder of a job holds nothing, with the cure; "" otherwise. A job that brought no file has such a folder from the start."""
    return f"the job's folder is empty, {_UNPACKED}" if own_job() and not os.listdir(".") else ""


_UNPACKED = (
    "as happens where two Ray nodes of one machine share a temporary folder; start the second one with a --temp-dir of its own (README, "
    "Machines of your own) and submit the job again"
)
