"""`moco-ray runs --compare A B`: where two runs differ, and their curves at the same steps.

Not responsible for reading a run (record.py) nor for judging one (verdicts.py).
"""

from moco_ray import attempts
from moco_ray.record import Record
from moco_ray.runs import NONE, columns, run_in

STEPS_SHOWN = 12
ALWAYS = ("data set", "steps", "git commit")
SCALARS = (("loss", "loss", "{:.3f}"), ("top1", "top-1", "{:.1%}"), ("images_per_second", "images/s", "{:.0f}"))


def compare(storage: str, first: str, second: str) -> str:
    """Recipe, data, code and metrics of two runs side by side. Raises UserError if one is none, or cannot be read."""
    one, other = (Record(run_in(storage, name)).refreshed() for name in (first, second))
    blocks = [
        ("Recipe", _recipe(one, other), "<<<<"),
        ("Data and code", _facts(one, other), "<<<"),
        ("Training, at the same steps", _training(one, other), ">" * 7),
        ("kNN", _evaluations(one, other), ">>>"),
    ]
    return "\n".join(line for title, rows, sides in blocks for line in (title, *_block(rows, sides), "")).rstrip()


def _block(rows: list[tuple[str, ...]] | str, sides: str) -> list[str]:
    return [f"  {line}" for line in ([rows] if isinstance(rows, str) else columns(rows, sides))]


def _recipe(one: Record, other: Record) -> list[tuple[str, ...]] | str:
    """Every value that differs; with those that a resumed run may change marked as what they are."""
    mine, theirs = one.folder.recipe(), other.folder.recipe()
    computing = {line.partition(":")[0] for line in mine.differences(theirs)}
    a, b = mine.model_dump(mode="json"), theirs.model_dump(mode="json")
    rows = [
        (f"{section}.{key}", _value(a[section][key]), _value(b[section][key]), "" if f"{section}.{key}" in computing else "(changes no number of the training)")
        for section in a
        for key in a[section]
        if a[section][key] != b[section][key]
    ]
    return [("", one.name, other.name, ""), *rows] if rows else "the same in every value"


def _value(value: object) -> str:
    text = str(value)
    return text if text else "''"


def _facts(one: Record, other: Record) -> list[tuple[str, ...]]:
    """Data set, steps and commit always; of the rest what differs, and the names of what does not."""
    mine, theirs = _versions(one), _versions(other)
    rows = [(name, mine.get(name, NONE), theirs.get(name, NONE)) for name in {**mine, **theirs}]
    shown = [row for row in rows if row[1] != row[2] or row[0] in ALWAYS]
    same = ", ".join(name for name, a, b in rows if a == b and name not in ALWAYS)
    return [("", one.name, other.name), *shown, *([("the same", same, "")] if same else [])]


def _versions(record: Record) -> dict[str, str]:
    """Of the data, and of the code of every start."""
    facts, starts = record.facts, [attempt.code for attempt in attempts.all_of(record.folder.store)]
    commits = [f"{str(code.get('git_commit', ''))[:12] or 'none'}{' (changed)' if code.get('git_dirty') else ''}" for code in (facts, *starts) if code]
    versions = facts.get("versions")
    return {
        "data set": f"{facts.get('data_fingerprint', '?')}, {record.derived['rows']:,} rows",
        "steps": f"{record.derived['total_steps']:,}",
        "git commit": ", ".join(dict.fromkeys(commits)),
        "begun": str(facts.get("started", "?")),
        "python": str(facts.get("python", "?")),
        **({name: str(version) for name, version in versions.items()} if isinstance(versions, dict) else {}),
    }


def _training(one: Record, other: Record) -> list[tuple[str, ...]] | str:
    a, b = ({entry["step"]: entry for entry in record.training} for record in (one, other))
    common = sorted(a.keys() & b.keys())
    if not common:
        return "no step was logged by both"
    last = len(common) - 1
    chosen = sorted({common[round(i * last / (STEPS_SHOWN - 1))] for i in range(STEPS_SHOWN)})
    heads = [f"{label} {record.name}" for _, label, _ in SCALARS for record in (one, other)]
    return [("step", *heads), *((str(step), *_scalars(a[step], b[step])) for step in chosen)]


def _scalars(a: dict, b: dict) -> list[str]:
    return [form.format(entry[name]) if isinstance(entry.get(name), int | float) else NONE for name, _, form in SCALARS for entry in (a, b)]


def _evaluations(one: Record, other: Record) -> list[tuple[str, ...]] | str:
    a, b = ({entry["step"]: entry["knn_top1"] for entry in record.evaluations} for record in (one, other))
    steps = sorted(a.keys() | b.keys())
    if not steps:
        return "neither was evaluated"
    chosen = sorted({*steps[-STEPS_SHOWN:], *(max(found, key=found.get) for found in (a, b) if found)})
    return [("step", one.name, other.name), *((str(step), *(f"{found[step]:.1%}" if step in found else NONE for found in (a, b))) for step in chosen)]
