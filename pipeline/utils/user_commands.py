"""The form in which a hint names a command of this project, by the command line of this process.

    user_command("watch")   # "python launchers/watch.py" in a process of launchers/; elsewhere "rollcall watch"

Roles have the second form, which an installation has too, whether or not there is a checkout.
"""

import sys
from pathlib import Path

_SCRIPTS = "launchers"


def user_command(name: str) -> str:
    """The start of a command line in the form in which the user started this process."""
    is_script = Path(sys.argv[0]).resolve().parent.name == _SCRIPTS
    return f"python {_SCRIPTS}/{name}.py" if is_script else f"rollcall {name}"
