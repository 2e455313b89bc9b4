"""The containers in which jobs of Slurm are tested; without any, their tests are not collected."""

from __future__ import annotations

import os

PYXIS = os.environ.get("LAUNCH_TEST_PYXIS", "")
"""A folder with enroot/bin, spank_pyxis.so and box.sqsh, an image with Python (docs/testing.md)."""
APPTAINER = os.environ.get("LAUNCH_TEST_APPTAINER_IMAGE", "")
"""An image with Python that the installed apptainer runs."""
IMAGES = [image for image in (f"{PYXIS}/box.sqsh" if PYXIS else "", APPTAINER) if image]
collect_ignore = [] if IMAGES else ["test_containers.py"]
