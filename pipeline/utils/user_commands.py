"""The form in which a hint names a command of this project.

user_command("watch")   # "rollcall watch"; in a script of launchers/ "python launchers/watch.py"
"""

import sys
from pathlib import Path

_SCRIPTS = "launchers"


def user_command(name: str) -> str:
    """The start of a command line in the form in which the user started this process."""
    is_script = Path(sys.argv[0]).resolve().parent.name == _SCRIPTS
    return f"python {_SCRIPTS}/{name}.py" if is_script else f"rollcall {name}"
