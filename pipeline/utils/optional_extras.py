"""The install command of an optional extra, for the hint of an error.

The command names the packages of the extra, as listed in the installed metadata, and not this project, which is on no
package index yet.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, requires
from shlex import quote

DISTRIBUTION = "rollcall-rl"
"""The project's name among installed packages."""


def pip_install(extra: str) -> str:
    """The command that installs the packages of `extra` in `[project.optional-dependencies]`.

    Raises `KeyError` for an unknown extra.
    """
    try:
        requirements = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # a checkout that was never installed
        return f"pip install -e '.[{extra}]' in the checkout"
    of_extra = re.compile(rf"""^(?P<package>.*?)\s*;\s*extra\s*==\s*["']{re.escape(extra)}["']$""")
    packages = [match["package"] for requirement in requirements if (match := of_extra.match(requirement))]
    if not packages:
        raise KeyError(f"no extra {extra!r} in pyproject.toml")
    return f"{sys.executable} -m pip install {' '.join(quote(package) for package in packages)}"
