"A network of the user's own, by the name of a function, in every job; and nowhere else."
import json, os, subprocess, sys
from pathlib import Path

import nbformat, pytest
from multigrain.catalog import open_model
from multigrain.datasets import world_folder
from multigrain.explore_search import open_extractor
from multigrain.heatmap import Scene
from multigrain.panels import figure

ROOT = Path(__file__).resolve().parent.parent
NETS = """import torch
from torch import nn
from multigrain.model import MultiGrain
open('imported.txt', 'a').write('x')

def make_trunk():
    first = nn.Conv2d(3, 16, 3, 4, 1), nn.BatchNorm2d(16), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU())

def make_model(): return MultiGrain(make_trunk(), p=2., n_classes=4)
"""

@pytest.fixture(scope='module')
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp('own')
    (place/'my_nets.py').write_text(NETS)
    return place

def job(name, place, *words, ok=True):
    out = place/f'{name}.ipynb'
    command = [sys.executable, '-m', 'papermill', ROOT/'nbs'/f'{name}.ipynb', out, '--no-progress-bar', *words]
    env = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1', MULTIGRAIN_RUNS=str(place/'runs'))
    done = subprocess.run(list(map(str, command)), cwd=place, capture_output=True, text=True, timeout=900, env=env)
    assert (done.returncode == 0) == ok, done.stderr[-3000:]
    if not ok: return done.stderr
    return ''.join(o.get('text', '') for c in nbformat.read(out, 4).cells for o in c.get('outputs', []))

@pytest.mark.slow
def test_every_job_takes_it(place):
    "Trained, evaluated, whitened and saved, evaluated again, its exponent learned."
    smoke = world_folder('smoke')
    val, model = smoke/'val', ('-p', 'model', 'my_nets:make_model', '-p', 's', 32)
    assert 'my_nets.make_model at s* = 32, p* = 2' in job('whiten', place, *model, '-p', 'images', smoke/'whiten', '-p',
                                                          'shrinkage', 'oas', '-p', 'out', place/'white')
    job('evaluate', place, *model, '-p', 'dataset', val, '-p', 'out', place/'a')
    saved = ('-p', 'model', place/'white', '-p', 's', 32, '-p', 'dataset', val)
    said = job('evaluate', place, *saved, ok=False)
    assert 'made with a trunk of your own (my_nets:make_model)' in said and 'trunk=module:function' in said
    job('evaluate', place, *saved, '-p', 'trunk', 'my_nets:make_model', '-p', 'out', place/'b')
    job('finetune_p', place, *model, '-p', 'data', smoke, '-p', 'per_class', 4, '-p', 'out', place/'c')
    trunk = '-p', 'trunk', 'my_nets:make_trunk'
    job('train', place, '-p', 'preset', 'smoke', *trunk, '-p', 'data', smoke, '-p', 'name', 'own')
    run, = (place/'runs').glob('own-*')
    assert json.loads((run/'run.json').read_text())['complete']
    job('evaluate', place, '-p', 'model', run.name, *trunk, '-p', 'dataset', 'val', '-p', 'out', place/'d')
    said = job('search', place, *model, '-p', 'images', val, '-p', 'index', place/'index')
    assert 'expected by chance' in said and 'page:' in said
    names = [json.loads(next((place/o).glob('*.json')).read_text())['scores'][0]['name'] for o in 'abd']
    assert names == ['mAP', 'mAP', 'top-1']

def test_nothing_else_runs_it(place, monkeypatch):
    "The explorers, the app and open_model refuse, and the module is not even imported."
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    before = (place/'imported.txt').read_text() if (place/'imported.txt').exists() else ''
    saved = place/'white' if (place/'white').exists() else None
    for refused in (lambda: open_model('my_nets:make_model'), lambda: open_extractor('my_nets:make_model'),
                    lambda: figure(Scene(image='grace_hopper.jpg', model='my_nets:make_model')),
                    lambda: open_model(str(place), trunk='my_nets:make_model')):
        with pytest.raises((PermissionError, ValueError), match='runs its code'): refused()
    if saved:
        with pytest.raises(ValueError, match='a trunk of your own'): open_extractor(str(saved))
    assert 'my_nets' not in sys.modules
    assert ((place/'imported.txt').read_text() if (place/'imported.txt').exists() else '') == before

def test_only_the_jobs_ask_for_it():
    "`allow_code=True` stands in the jobs alone, never in the package."
    for o in (ROOT/'multigrain').glob('*.py'): # the message of a refusal names it
        assert 'allow_code=True' not in o.read_text().replace('(..., allow_code=True)', ''), o
    jobs = {o.name for o in (ROOT/'nbs').glob('[a-z]*.ipynb') if 'allow_code=True' in o.read_text()}
    assert {f'{o}.ipynb' for o in ('train', 'evaluate', 'whiten', 'finetune_p', 'search', 'recommend')} <= jobs
    assert not jobs & {'demo.ipynb', 'claims.ipynb', 'index.ipynb'}
    assert not [o for o in (ROOT/'nbs'/'explore').glob('*.ipynb') if 'allow_code' in o.read_text()]
