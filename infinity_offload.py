"""infinity under the unique name of its distribution: `import infinity_offload as infinity`.

Other packages are called `infinity`, too. Importing this module checks that `import infinity` gives the package next to this
file, and raises ImportError with a remedy if not; so the commands start here. It has the names of `infinity` and no submodules:
those are `infinity.swap` and so on. See decision 34.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infinity import *  # noqa: F403

PACKAGE = Path(__file__).resolve().parent / "infinity"


def _check_import_name() -> None:
    """Raise ImportError if `import infinity` gives another package than this distribution's."""
    spec = importlib.util.find_spec("infinity")
    origin = Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
    if origin == PACKAGE / "__init__.py":
        return
    if origin is None:
        move = "install infinity again: make setup in its clone, or pip install --force-reinstall with its wheel"
    elif {"site-packages", "dist-packages"} & {*origin.parts}:
        move = "pip uninstall what that is of, or use an environment without it"
    else:
        move = "rename it, or take its folder out of PYTHONPATH and out of the working directory"
    raise ImportError(
        f"`import infinity` finds {origin}, and infinity-offload is in {PACKAGE}: {move}", name="infinity"
    )


def bench() -> int:
    """The command `infinity-bench`."""
    from infinity.cli.bench import main

    return main()


def ckpt() -> int:
    """The command `infinity-ckpt`."""
    from infinity.cli.ckpt import main

    return main()


def run() -> int:
    """The command `infinity-run`."""
    from infinity.cli.launch import main

    return main()


def __getattr__(name: str) -> object:
    return getattr(sys.modules["infinity"], name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(sys.modules["infinity"])})


_check_import_name()
importlib.import_module("infinity")

if __name__ == "__main__":
    from infinity.__main__ import main

    sys.exit(main())
