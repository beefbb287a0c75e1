"""The project's own exceptions. Not here: their handling, which is the command line's."""


class UserError(ValueError):
    """Something that the user can cure. The text is one line: the thing, the rule, the cure.

    The command line prints it without a traceback and leaves with code 2. It survives pickling, so
    that a worker can raise it and the driver can show it.
    """


class NonFinite(UserError):
    """A loss or gradient was not finite: nothing was changed at that step and the run stopped."""


class Stopped(UserError):
    """The run was asked to stop (SIGTERM) and has: no mistake. The command line leaves with code 143, as of that signal."""


class StorageFailing(UserError):
    """The storage does not answer as it should, after all tries: later it may, without anybody doing anything."""
