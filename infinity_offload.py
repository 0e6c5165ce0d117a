"""infinity under the name of its distribution, which nobody else has: `import infinity_offload as infinity`.

There are other things called `infinity`. Importing this module finds out whether `import infinity` leads to the package that
lies beside this file, and fails with the next move where it doesn't. The commands start here for that. It has the names of
`infinity` and no modules of its own: those are `infinity.swap` and so on. Decision 34 says why.
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
    """Raise ImportError where `import infinity` gives something else than this distribution's package."""
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
