"The jobs evaluate, whiten and finetune_p, through papermill as people run them, on a network of the smoke preset."
import ast, inspect, json, os, shutil, subprocess, sys
from pathlib import Path

import nbformat, pytest
from multigrain.benchmark import score_benchmark, whitened
from multigrain.catalog import open_benchmark, open_model
from multigrain.datasets import SMOKE_WORLD
from multigrain.embed import embed
from multigrain.launch import Machine, Place, train
from multigrain.model import load
from multigrain.readers import image_folder
from multigrain.resolution import finetune_p
from multigrain.world import make_world

ROOT = Path(__file__).resolve().parent.parent

@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A folder with the smallest world and a store that holds one run, trained on it."
    place, here = tmp_path_factory.mktemp('jobs'), Path.cwd()
    make_world(place/'data'/'smoke', processes=1, progress=False, **SMOKE_WORLD)
    os.chdir(place)  # where the jobs run too: 'smoke' is the world that lies here
    try: run = train('smoke', Place(out=place/'runs'), Machine(progress=False))
    finally: os.chdir(here)
    shutil.move(run.folder, place/'runs'/'trained')
    return place

def job(name, place, *args, ok=True, runs='runs'):
    "Run a job; the text that its cells printed, or, where it should fail, what it said on stderr."
    out = place/f'{name}-{abs(hash(args))}.ipynb'
    command = [sys.executable, '-m', 'papermill', ROOT/'nbs'/f'{name}.ipynb', out, '--no-progress-bar', *args]
    env = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1', MULTIGRAIN_RUNS=str(place/runs))
    done = subprocess.run(list(map(str, command)), cwd=place, capture_output=True, text=True, timeout=300, env=env)
    assert (done.returncode == 0) == ok, done.stderr[-3000:]
    if not ok: return done.stderr
    cells = [c for c in nbformat.read(out, 4).cells if c.cell_type == 'code']
    return ''.join(o.get('text', '') for c in cells for o in c.outputs)

def test_evaluate(place):
    "The newest run, all benchmarks, p* chosen, whitened: every score has its interval and its protocol."
    world = place/'data'/'smoke'
    printed = job('evaluate', place, '-p', 'root', world, '-p', 'p', 'auto', '-p', 's', 40, '-p', 'whitening',
                  world/'whiten', '-p', 'dims', 8, '-p', 'keep', True, '-p', 'out', place/'results')
    file, = (place/'results').glob('trained-all-s40-*.json')
    found = json.loads(file.read_text())
    assert str(file) in printed and 'chosen on IN-aug' in printed
    assert [o['name'] for o in found['scores']] == ['top-1', 'Holidays mAP', 'UKBench', 'Copydays mAP', 'IN-aug']
    assert found['synthetic'] and found['p'] in range(1, 11) and found['parameters']['p'] == 'auto'
    for o in found['scores']:
        said = o['protocol']
        assert o['interval'][0] <= o['value'] <= o['interval'][1]
        assert said['s'] == 40 and said['p'] == found['p'] and said['model'].startswith('trained ')
        assert '8 dimensions from 12 images' in said['whitening'] and said['whitening_dims'] == 8
    assert found['scores'][1]['protocol']['ap'] == 'trapezoid' and found['scores'][3]['protocol']['distractors'] == 6
    assert len(list((place/'results').glob('embeddings-*/*/manifest.json'))) == 5

def test_whiten_then_evaluate(place):
    "The files classify as before; evaluate takes them, with a folder of one's own and a learned exponent."
    world = place/'data'/'smoke'
    job('whiten', place, '-p', 'images', world/'train', '-p', 'out', place/'white')
    before, white = load(place/'runs'/'trained'/'model'), load(place/'white')
    val = image_folder(world/'val')
    a, b = (embed(o, val, 32, logits=True, progress=False).logits for o in (before, white))
    assert white.whitening.n == 64 and (a.argmax(1) == b.argmax(1)).all()
    scores = json.loads((place/'white'/'scores.json').read_text())
    names = ['Holidays mAP', 'UKBench', 'Copydays mAP', 'IN-aug']
    assert all([o['name'] for o in scores[k]] == names for k in ('before', 'after'))
    printed = job('evaluate', place, '-p', 'model', place/'white', '-p', 'dataset', world/'val', '-p', 'p', 'finetune',
                  '-p', 'out', place/'own')
    found = json.loads(next((place/'own').glob('*.json')).read_text())
    assert {'mAP', 'precision@5', 'recall@10'} <= {o['name'] for o in found['scores']} and 'learned from' in printed
    assert found['s'] == 32 and '64 images' in found['scores'][0]['protocol']['whitening'] and not found['synthetic']

def test_finetune_p(place):
    printed = job('finetune_p', place, '-p', 's', 48, '-p', 'per_class', 6, '-p', 'lr', .5, '-p', 'out', place/'tuned')
    found = json.loads(next((place/'tuned').glob('trained-finetune_p-s48-*.json')).read_text())
    assert len(found['curve']['p']) == 6 and found['curve']['p'][0] == found['p_start'] == 3 and found['p'] != 3
    assert f'{found["p"]:.3f}' in printed

@pytest.mark.parametrize('name, args, words', [
    ('evaluate', ('datset', 'val'), 'datset (did you mean dataset?)'),
    ('evaluate', ('p', 'best'), "p='best' must be a number, auto or finetune"),
    ('whiten', ('images', '/nowhere'), "images='/nowhere' is not a folder"),
    ('finetune_p', ('per_clas', 9), 'per_clas (did you mean per_class?)')])
def test_a_mistake_is_named(place, name, args, words):
    assert words in job(name, place, '-p', *args, ok=False)

def test_without_a_run_the_sentence_says_what_to_type(place):
    "No job trains by surprise: a store without a run is one sentence."
    said = job('evaluate', place, ok=False, runs='none')
    assert 'holds no complete run: train one with papermill nbs/train.ipynb out.ipynb' in said
    assert not (place/'none').exists()

def parameters_of(name):
    "The parameters cell of a job: name -> default."
    cells = nbformat.read(ROOT/'nbs'/f'{name}.ipynb', 4).cells
    cell, = [c for c in cells if 'parameters' in c.metadata.get('tags', [])]
    lines = [o for o in cell.source.splitlines() if not o.startswith('declare')]
    assert all(' # ' in o for o in lines), 'every parameter has its own line with a comment'
    assigned = [o for o in ast.parse(cell.source).body if isinstance(o, ast.Assign)]
    assert len(assigned) == len(lines)
    return {o.targets[0].id: ast.literal_eval(o.value) for o in assigned}

# what a job decides itself, or opens by name; its own word for an option where it has one
WITHOUT = {'evaluate': {'name', 'data', 'images', 'ps', 'whiten', 'shrinkage', 'stated', 'folder', 'progress',
                        'per_class'},
           'whiten': {'name', 'root', 'progress'}, 'finetune_p': {'name', 'root', 'images', 'progress'}}
WORDS = {'dim': 'dims'}
CALLED = {'evaluate': (open_benchmark, score_benchmark), 'whiten': (whitened,), 'finetune_p': (finetune_p,)}

@pytest.mark.parametrize('name', CALLED)
def test_parameters_are_those_of_the_functions(name):
    "A parameter of the functions that a job calls is one of the job, with the same default: they cannot drift apart."
    known = parameters_of(name)
    for function in CALLED[name]:
        for o in inspect.signature(function).parameters.values():
            word = WORDS.get(o.name, o.name)
            if word in WITHOUT[name]: continue
            assert word in known, f'{name}.ipynb lacks {word} of {function.__name__}'
            if word in ('model', 's') or o.default is inspect.Parameter.empty: continue # the run and its resolution
            assert (known[word] or None) == (o.default or None), f'{word} of {name}.ipynb'
    assert known['trunk'] == inspect.signature(open_model).parameters['trunk'].default
