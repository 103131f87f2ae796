"""The notebooks run from top to bottom without an accelerator, and are kept with the outputs of such a run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
each = pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.name)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def text_outputs(notebook: Any) -> Iterator[str]:
    for cell in code_cells(notebook):
        for output in cell.outputs:
            yield output.get("text") or output.get("data", {}).get("text/plain", "")


def assert_ran_well(notebook: Any) -> None:
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert printed(cells[-1]).rstrip("\n").split("\n")[-1] == "identical: True"
    assert "same bits: False" not in "".join(text_outputs(notebook))


def execute(notebook: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel finds the package as this process does.
    found = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", found)
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()


@each
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(path, as_version=4)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    execute(notebook, tmp_path, monkeypatch)
    assert_ran_well(notebook)


@each
def test_notebook_is_kept_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert_ran_well(notebook)
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)
    assert any("image/png" in output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs)
    # Nothing of the machine that it was run on.
    for text in text_outputs(notebook):
        assert not re.search(r"/(home|tmp|usr|root|work|opt|Users)/|site-packages|0x[0-9a-f]{6}|Warning", text), text


def test_a_notebook_with_another_verdict_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = nbformat.v4.new_code_cell("print('identical: False')")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    execute(notebook, tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        assert_ran_well(notebook)
