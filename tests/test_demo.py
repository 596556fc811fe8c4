"`make demo` at the smallest scale: one page with all pictures, and a second call that makes nothing again."
import os, re, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).parents[1]

def demo(tmp_path, *words, env={}):
    "Exit code and stderr of the demo through papermill."
    command = [sys.executable, '-m', 'papermill', ROOT/'nbs/demo.ipynb', tmp_path/'demo.ipynb',
               '-p', 'preset', 'smoke', '-p', 'out', tmp_path, *words]
    env = os.environ | dict(OMP_NUM_THREADS='1', MULTIGRAIN_RUNS=str(tmp_path/'runs')) | env
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, env=env)
    return done.returncode, done.stderr

def test_demo(tmp_path):
    def times(): return [o.stat().st_mtime_ns for o in tmp_path.glob('runs/*/model/model.safetensors')]
    code, err = demo(tmp_path, '-p', 'lam', '0.5')
    assert code == 0, err[-2000:]
    assert all(f'{i} of 6' in err for i in range(1, 7))
    text = (tmp_path/'demo.html').read_text()
    assert text.count('<img') == 6 and 'make lab' in text and 'drawn images' in text
    found = re.search(r'(\d+) of (\d+) held-out views find', text)
    assert int(found[1]) >= .8*int(found[2]) >= 8, found[0] # Lite0 on real photographs
    assert 'http' not in text.split('<body>')[0]
    made = times()
    code, err = demo(tmp_path, '-p', 'lam', '0.5')
    assert code == 0 and times() == made and len(made) == 1

@pytest.mark.parametrize('words, says', [(('-p', 'lam', '2'), 'lam=2'), (('-p', 'photo', 'nowhere.jpg'), 'nowhere.jpg'),
                                         (('-p', 'preset', 'paper'), 'smoke or mini')])
def test_a_mistake_ends_it_at_once(tmp_path, words, says):
    code, err = demo(tmp_path, *words)
    assert code == 1 and says in err and not (tmp_path/'runs').exists()

HIDE = '''
import multigrain.datasets as d
d.package_photos = dict
'''

def test_without_the_photographs_drawn_scenes_stand_in(tmp_path):
    "A kernel that starts as if the packages were not there: the page says so."
    profile = tmp_path/'ipython'/'profile_default'/'startup'
    profile.mkdir(parents=True)
    (profile/'00-hide.py').write_text(HIDE)
    code, err = demo(tmp_path, env=dict(IPYTHONDIR=str(tmp_path/'ipython')))
    assert code == 0, err[-2000:]
    assert 'drawn scenes stand in for photographs' in err
    assert 'drawn scenes stand in' in (tmp_path/'demo.html').read_text()
