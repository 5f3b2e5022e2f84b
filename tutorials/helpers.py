"""What the notebooks of this folder share: made-up data, so that nothing has to be downloaded, and bar charts."""

from __future__ import annotations

import sys
from pathlib import Path

from monai_gds.bench.made_up import ct_like, find_pairs, write_image_folder, write_volumes

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of a clone: for tools

from tools.figures import draw

__all__ = ["ct_like", "draw", "find_pairs", "write_image_folder", "write_volumes"]
