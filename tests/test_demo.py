"`make demo` at the smallest scale: one page with all pictures, and a second call that makes nothing again."
import os, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).parents[1]

def demo(tmp_path, *words):
    "Exit code and stderr of the demo through papermill."
    command = [sys.executable, '-m', 'papermill', ROOT/'nbs/demo.ipynb', tmp_path/'demo.ipynb',
               '-p', 'preset', 'smoke', '-p', 'out', tmp_path, *words]
    env = os.environ | dict(OMP_NUM_THREADS='1', MULTIGRAIN_RUNS=str(tmp_path/'runs'))
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, env=env)
    return done.returncode, done.stderr

def test_demo(tmp_path):
    def times(): return [o.stat().st_mtime_ns for o in tmp_path.glob('runs/*/model/model.safetensors')]
    code, err = demo(tmp_path, '-p', 'lam', '0.5')
    assert code == 0, err[-2000:]
    assert all(f'{i} of 6' in err for i in range(1, 7))
    text = (tmp_path/'demo.html').read_text()
    assert text.count('<img') == 5 and 'make lab' in text and 'synthetic' in text
    assert 'http' not in text.split('<body>')[0]
    made = times()
    code, err = demo(tmp_path, '-p', 'lam', '0.5')
    assert code == 0 and times() == made and len(made) == 1

@pytest.mark.parametrize('words, says', [(('-p', 'lam', '2'), 'lam=2'), (('-p', 'photo', 'nowhere.jpg'), 'nowhere.jpg'),
                                         (('-p', 'preset', 'paper'), 'smoke or mini')])
def test_a_mistake_ends_it_at_once(tmp_path, words, says):
    code, err = demo(tmp_path, *words)
    assert code == 1 and says in err and not (tmp_path/'runs').exists()
