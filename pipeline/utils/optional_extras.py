"""How to install an optional part of the project.

Owns the sentence that errors end with. Promises never to name this project on the public package index, where its name
is somebody else's: the packages of the extra are named themselves, as the installed metadata list them.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, requires
from shlex import quote


def pip_install(extra: str) -> str:
    """The command that installs what `[project.optional-dependencies]` lists under `extra`.

    `KeyError` for an extra that the project does not have.
    """
    try:
        requirements = requires("rollcall") or []
    except PackageNotFoundError:  # a checkout that was never installed
        return f"pip install -e '.[{extra}]' in the checkout"
    of_extra = re.compile(rf"""^(?P<package>.*?)\s*;\s*extra\s*==\s*["']{re.escape(extra)}["']$""")
    packages = [found["package"] for requirement in requirements if (found := of_extra.match(requirement))]
    if not packages:
        raise KeyError(f"no extra {extra!r} in pyproject.toml")
    return f"{sys.executable} -m pip install {' '.join(quote(package) for package in packages)}"
