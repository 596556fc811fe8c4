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

def check_copies(text, views):
    "What the page says about copies: nearly all are found, most are flagged at 5 %, and so are some held-out views."
    def numbers(words): return [int(o) for o in re.search(words.replace('N', r'(\d+)'), text).groups()]
    n, easy, strong = numbers('Of N ordinary copies .*? N find their original first; of as many strong ones .*? N\\.')
    assert n > 50 and min(easy, strong) >= .9*n, (n, easy, strong)
    rates = numbers('N at 1 % and N at 5 % of the ordinary ones, N at 1 % and N at 5 % of the strong ones')
    assert rates[0] <= rates[1] and rates[2] <= rates[3] <= rates[1], rates
    assert rates[1] >= .8*n and rates[3] >= .45*n, rates
    few, more = numbers('N at 1 % and N at 5 % pass it too')
    assert few <= more <= views and more <= .9*views, (few, more) # other views are not copies
    assert 'at 5 %: its original is above the threshold' in text # the row that is shown says something

def test_demo(tmp_path):
    def times(): return [o.stat().st_mtime_ns for o in tmp_path.glob('runs/*/model/model.safetensors')]
    code, err = demo(tmp_path, '-p', 'lam', '0.5')
    assert code == 0, err[-2000:]
    assert all(f'{i} of 6' in err for i in range(1, 7))
    text = (tmp_path/'demo.html').read_text()
    assert text.count('<img') == 6 and 'make lab' in text and 'drawn images' in text
    found = re.search(r'(\d+) of (\d+) held-out views find', text)
    assert int(found[1]) >= .8*int(found[2]) >= 8, found[0] # Lite0 on real photographs
    check_copies(text, views=int(found[2]))
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
import multigrain.datasets as d, multigrain.photos as p
d.package_photos = p.package_photos = dict
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
