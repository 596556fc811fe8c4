"The jobs evaluate, whiten and finetune_p, through papermill as people run them, on a network of the smoke preset."
import json, os, shutil, subprocess, sys
from pathlib import Path

import nbformat, pytest
from multigrain.data import image_folder
from multigrain.embed import embed
from multigrain.model import load
from multigrain.training import SMOKE_WORLD, train
from multigrain.world import make_world

ROOT = Path(__file__).resolve().parent.parent

@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A folder with the smallest world and a store that holds one run, trained on it."
    place, here = tmp_path_factory.mktemp('jobs'), Path.cwd()
    make_world(place/'data'/'smoke', processes=1, progress=False, **SMOKE_WORLD)
    os.chdir(place)  # where the jobs run too: 'smoke' is the world that lies here
    try: run = train('smoke', out=place/'runs', progress=False)
    finally: os.chdir(here)
    shutil.move(run.folder, place/'runs'/'trained')
    return place

def job(name, place, *args, ok=True):
    "Run a job; the text that its cells printed, or, where it should fail, what it said on stderr."
    out = place/f'{name}-{abs(hash(args))}.ipynb'
    done = subprocess.run([sys.executable, '-m', 'papermill', str(ROOT/'nbs'/f'{name}.ipynb'), str(out), '--no-progress-bar', *map(str, args)], cwd=place, capture_output=True, text=True, timeout=300,
                          env=os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1', MULTIGRAIN_RUNS=str(place/'runs')))
    assert (done.returncode == 0) == ok, done.stderr[-3000:]
    if not ok: return done.stderr
    return ''.join(o.get('text', '') for c in nbformat.read(out, 4).cells if c.cell_type == 'code' for o in c.outputs)

def test_evaluate(place):
    "The newest run, all benchmarks, p* chosen, whitened: every score has its interval and its protocol."
    printed = job('evaluate', place, '-p', 'root', place/'data'/'smoke', '-p', 'p', 'auto', '-p', 's', 40, '-p', 'whitening', place/'data'/'smoke'/'whiten', '-p', 'dims', 8,
                  '-p', 'keep', True, '-p', 'out', place/'results')
    file, = (place/'results').glob('trained-all-s40-*.json')
    found = json.loads(file.read_text())
    assert str(file) in printed and 'chosen on IN-aug' in printed
    assert [o['name'] for o in found['scores']] == ['top-1', 'Holidays mAP', 'UKBench', 'Copydays mAP', 'IN-aug']
    assert found['synthetic'] and found['p'] in range(1, 11) and found['parameters']['p'] == 'auto'
    for o in found['scores']:
        assert o['interval'][0] <= o['value'] <= o['interval'][1]
        assert o['protocol']['s'] == 40 and o['protocol']['p'] == found['p'] and '8 dimensions from 12 images' in o['protocol']['whitening'] and o['protocol']['model'].startswith('trained ')
    assert found['scores'][1]['protocol']['ap'] == 'trapezoid' and found['scores'][3]['protocol']['distractors'] == 6
    assert len(list((place/'results').glob('embeddings-*/*/manifest.json'))) == 5

def test_whiten_then_evaluate(place):
    "The files classify as before; evaluate takes them, with a folder of one's own and a learned exponent."
    job('whiten', place, '-p', 'images', place/'data'/'smoke'/'train', '-p', 'out', place/'white')
    before, white = load(place/'runs'/'trained'/'model'), load(place/'white')
    val = image_folder(place/'data'/'smoke'/'val')
    a, b = (embed(o, val, 32, logits=True, progress=False).logits for o in (before, white))
    assert white.whitening.n == 64 and (a.argmax(1) == b.argmax(1)).all()
    scores = json.loads((place/'white'/'scores.json').read_text())
    assert all([o['name'] for o in scores[k]] == ['Holidays mAP', 'UKBench', 'Copydays mAP', 'IN-aug'] for k in ('before', 'after'))
    printed = job('evaluate', place, '-p', 'model', place/'white', '-p', 'dataset', place/'data'/'smoke'/'val', '-p', 'p', 'finetune', '-p', 'out', place/'own')
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
