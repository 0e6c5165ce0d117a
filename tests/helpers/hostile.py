"""A pickle that does something when it is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class MakesFolder:
    """Makes a folder when its pickle is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)
