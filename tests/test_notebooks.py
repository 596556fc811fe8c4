"Every notebook runs, cell by cell, with its tests (nbdev_test)."
import subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
JOBS = {'train', 'evaluate', 'whiten', 'finetune_p', 'recommend', 'demo'} # in tests of their own, through papermill
ELSEWHERE = {'.ipynb_checkpoints', 'bench', 'paper', 'explore', 'studies'}
NOTEBOOKS = [p.relative_to(ROOT) for p in sorted((ROOT/'nbs').rglob('*.ipynb'))
             if not ELSEWHERE & {*p.parts} and p.stem not in JOBS]

@pytest.mark.parametrize('nb', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(nb):
    command = [Path(sys.executable).parent/'nbdev_test', '--path', nb, '--n_workers', '0', '--do_print']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
