"""Execute the notebooks of docs/notebooks: `python docs/hooks/notebooks.py [NAME …]` writes them with their outputs."""

from __future__ import annotations

import base64
import io
import os
import sys
import sysconfig
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore:IProgress not found",
    "NO_COLOR": "1",
    "COLUMNS": "100",
}
"""Environment variables of the kernel, so that outputs have no progress bars, colours and notes of other libraries."""


def execute(path: Path) -> nbformat.NotebookNode:
    """Run a notebook from top to bottom in a new kernel and an empty folder.

    Args:
        path: The notebook's file, which is not changed.

    Returns:
        The notebook with the outputs of this run.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell ended with an error.
    """
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    metadata = dict(notebook.metadata)
    with tempfile.TemporaryDirectory() as folder:
        commands = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
        environment = {**os.environ, **SETTINGS, "PATH": commands, "DELTUNE_CACHE": str(Path(folder) / ".cache")}
        client = NotebookClient(
            notebook,
            timeout=3600,
            record_timing=False,
            resources={"metadata": {"path": folder}},
            extra_arguments=["--log-level=ERROR"],  # no note that the kernel's sockets are not encrypted
        )
        client.execute(env=environment)
    notebook.metadata = nbformat.from_dict(metadata)  # without the kernel's versions
    return notebook


def drop_warnings(notebook: nbformat.NotebookNode) -> None:
    """Leave out what libraries write to stderr, which has the paths and times of this machine."""
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def reduce_pictures(notebook: nbformat.NotebookNode) -> None:
    """Give the pictures of a notebook palettes of 64 colours, which are half as large and look the same."""
    for output in [output for cell in notebook.cells for output in cell.get("outputs", ())]:
        if "image/png" in output.get("data", {}):
            picture = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGB")
            reduced = io.BytesIO()
            picture.quantize(64, dither=Image.Dither.NONE).save(reduced, "PNG", optimize=True)
            output.data["image/png"] = base64.b64encode(reduced.getvalue()).decode()


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")):
        path = NOTEBOOKS / f"{name}.ipynb"
        executed = execute(path)
        drop_warnings(executed)
        reduce_pictures(executed)
        nbformat.write(executed, path)
        print(path.name, f"{path.stat().st_size / 1000:.0f} kB")
