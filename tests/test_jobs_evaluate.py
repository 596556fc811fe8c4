"The jobs evaluate, whiten, finetune_p and recommend, through papermill as people run them, with a network of smoke."
import ast, inspect, json, os, shutil, subprocess, sys
from pathlib import Path

import nbformat, pytest
from multigrain.benchmark import recommend, score_benchmark, whitened
from multigrain.catalog import open_benchmark, open_model
from multigrain.datasets import SMOKE_WORLD
from multigrain.embed import embed
from multigrain.explore_search import open_extractor
from multigrain.launch import Machine, Place, train
from multigrain.model import load, save
from multigrain.readers import image_folder
from multigrain.recipe import make_recipe
from multigrain.resolution import finetune_p
from multigrain.search import Index
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

def job(name, place, *args, ok=True, runs='runs', terminal=False):
    "Run a job; the text that its cells printed, or what the terminal shows, as it does where a job should fail."
    out = place/f'{name}-{abs(hash(args))}.ipynb'
    command = [sys.executable, '-m', 'papermill', ROOT/'nbs'/f'{name}.ipynb', out, '--no-progress-bar', *args]
    env = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1', MULTIGRAIN_RUNS=str(place/runs))
    done = subprocess.run(list(map(str, command)), cwd=place, capture_output=True, text=True, timeout=300, env=env)
    assert (done.returncode == 0) == ok, done.stderr[-3000:]
    if terminal or not ok: return done.stderr
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
    names = ['Holidays mAP', 'UKBench', 'Copydays mAP', 'IN-aug'] # as they are, and whitened; accuracy once
    assert [o['name'] for o in found['scores']] == ['top-1'] + [o for name in names for o in (name, name)]
    assert [o['protocol']['whitening_dims'] for o in found['scores']] == [0] + [0, 8]*4
    assert found['synthetic'] and found['p'] in range(1, 11) and found['parameters']['p'] == 'auto'
    for o in found['scores']:
        said = o['protocol']
        assert o['interval'][0] <= o['value'] <= o['interval'][1]
        assert said['s'] == 40 and said['p'] == found['p'] and said['model'].startswith('trained ')
        assert ('8 dimensions from 12 images' in (said['whitening'] or '')) == (said['whitening_dims'] == 8)
    assert found['scores'][1]['protocol']['ap'] == 'trapezoid' and found['scores'][5]['protocol']['distractors'] == 6
    assert len(list((place/'results').glob('embeddings-*/*/manifest.json'))) == 6
    assert 'shrinkage' in printed and 'condition number' in printed and 'have also taught' not in printed

def test_evaluate_shows_both_and_says_where_images_are_the_same(place):
    "Plain and whitened side by side on the terminal; a whitening that was learned from what it is scored on is told."
    val = place/'data'/'smoke'/'val'
    said = job('evaluate', place, '-p', 'dataset', val, '-p', 'whitening', val, '-p', 'out', place/'both',
               terminal=True)
    scores = json.loads(next((place/'both').glob('*.json')).read_text())['scores']
    plain, white = (o for o in scores if o['name'] == 'mAP')
    assert plain['value'] != white['value']
    line, = [o for o in said.splitlines() if o.startswith('val: mAP ')]
    assert line.startswith(f'val: mAP {plain["value"]:.2f} %') and f', whitened {white["value"]:.2f} %' in line
    assert 'note: 24 of 24 images of val have also taught the whitening' in said and 'for each, and below 5' in said

def test_whiten_then_evaluate(place):
    "The files classify as before; evaluate takes them, with a folder of one's own and a learned exponent."
    world = place/'data'/'smoke'
    said = job('whiten', place, '-p', 'images', world/'train', '-p', 'out', place/'white', terminal=True)
    assert 'strong copies of held-out images: mAP' in said and '; labels: mAP' in said and ': use ' in said
    assert 'condition number' in said and 'shrinkage ' in said and 'note: 64 images for ' in said
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

@pytest.fixture(scope='module')
def photos(place):
    "Drawn pictures that nothing says are drawn: a folder for each class, as anybody has it."
    for part in ('train', 'val'): shutil.copytree(place/'data'/'smoke'/part, place/'photos'/part)
    return place/'photos'

def test_nothing_synthetic_for_a_run_on_photographs(place, photos):
    "A run on a folder is scored on that folder, whitened with its images and by copies of them; no world is drawn."
    recipe = make_recipe('smoke', data=str(photos), epochs=1, iterations=2)
    run = train(recipe, Place('own', out=place/'runs2'), Machine(progress=False))
    before = sorted((place/'data').iterdir())
    printed = job('evaluate', place, '-p', 'model', run.folder, '-p', 'p', 'auto', '-p', 'out', place/'photo-results')
    found = json.loads(next((place/'photo-results').glob('*.json')).read_text())
    assert {o['protocol']['images'] for o in found['scores']} == {'photos val', 'IN-aug of photos train'}
    assert [o['name'] for o in found['scores']] == ['top-1', 'Copies mAP', 'IN-aug'] and not found['synthetic']
    assert 'chosen on IN-aug of photos train' in printed and 'synthetic' not in printed
    job('whiten', place, '-p', 'model', run.folder, '-p', 'shrinkage', 'oas', '-p', 'out', place/'white-photos')
    assert load(place/'white-photos').whitening.n == 64
    scores = json.loads((place/'white-photos'/'scores.json').read_text())
    assert [o['name'] for o in scores['before']] == ['Copies mAP', 'IN-aug']
    about = json.loads((place/'white-photos'/'about.json').read_text())
    assert about['classes'] == run.record['data']['train']['class_names'] and about['data'] == str(photos)
    assert sorted((place/'data').iterdir()) == before

def test_nothing_synthetic_for_a_model_without_data(place, photos):
    "Of a network that was only saved nothing is known: it is scored on the folder that is given, or not at all."
    save(load(place/'runs'/'trained'/'model'), place/'bare')
    bare = ('-p', 'model', place/'bare', '-p', 's', 32)
    assert 'nothing is known of the data of this model' in job('evaluate', place, *bare, ok=False)
    assert "name='holidays' needs root" in job('evaluate', place, *bare, '-p', 'dataset', 'holidays', ok=False)
    assert "whitening='world' is synthetic" in job('evaluate', place, *bare, '-p', 'dataset', photos/'val', '-p',
                                                   'whitening', 'world', ok=False)
    assert 'give a folder of images' in job('whiten', place, *bare, ok=False)
    printed = job('evaluate', place, *bare, '-p', 'dataset', photos/'val', '-p', 'p', 'auto', '-p', 'out',
                  place/'bare-out')
    assert 'chosen on IN-aug of val' in printed
    found = json.loads(next((place/'bare-out').glob('*.json')).read_text())
    assert {o['protocol']['images'] for o in found['scores']} == {'val'}

def test_a_list_of_queries(place, photos):
    "Queries with right answers and junk, from a CSV file; the terminal ends with the result and where it is."
    files = image_folder(photos/'val').paths
    names = [Path(o).relative_to(photos/'val').as_posix() for o in files]
    lines = [f'{names[i]},{names[i + 1]};{names[i + 2]},{names[i + 3]}' for i in (0, 6, 12)]
    (place/'truth.csv').write_text('\n'.join(['query,positives,junk', *lines]) + '\n')
    said = job('evaluate', place, '-p', 'dataset', place/'truth.csv', '-p', 'root', photos/'val', '-p', 'out',
               place/'judged', terminal=True)
    file, = (place/'judged').glob('*.json')
    score = json.loads(file.read_text())['scores'][0]
    assert (score['name'], score['n_queries'], score['protocol']['junk']) == ('mAP', 3, 3)
    assert score['protocol']['database'] == len(files) - 3 # the queries are on nobody's list
    lines = said.strip().splitlines()
    at = lines.index(f'results: {file}') # behind it are only the last words of a kernel that ends, on a busy machine
    assert lines[at - 1].startswith(f'truth: mAP {score["value"]:.2f} %'), said[-3000:]
    assert not any('mAP' in o or str(place) in o for o in lines[at + 1:]), said[-3000:]

def test_finetune_p(place):
    printed = job('finetune_p', place, '-p', 's', 48, '-p', 'per_class', 6, '-p', 'lr', .5, '-p', 'out', place/'tuned')
    found = json.loads(next((place/'tuned').glob('trained-finetune_p-s48-*.json')).read_text())
    assert len(found['curve']['p']) == 6 and found['curve']['p'][0] == found['p_start'] == 3 and found['p'] != 3
    assert f'{found["p"]:.3f}' in printed

def test_recommend(place, photos):
    "One line to use, and a model that opens with the settings; a folder without labels is asked by strong copies."
    grid = ('-p', 'model', place/'runs'/'trained', '-r', 's', '32 48', '-p', 'ps', 3)
    said = job('recommend', place, *grid, '-p', 'images', photos/'val', '-p', 'out', place/'ready', terminal=True)
    found, opened = json.loads((place/'ready'/'recommended.json').read_text()), open_model(str(place/'ready'))
    assert len(found['tried']) == 2*2*2 and 'their labels' in found['text']
    best = max(found['tried'], key=lambda o: o['mAP'])
    used = next(o for o in found['tried'] if o['difference'] == 0)
    assert best['mAP'] - .25 <= used['mAP'] or 'cannot tell' in found['text'] and used['s*'] == 32
    white = 'not whitened' if opened.model.whitening is None else 'whitened'
    shape = 'square' if opened.square else 'rectangle'
    assert found['text'].startswith(f's* = {opened.s}, {shape}, p* = {opened.model.p:g}, {white}:')
    learn = f' -p whitening {photos/"val"}'*(white == 'whitened')
    assert f'use: -p s {opened.s} -p square {opened.square} -p p {opened.model.p:g}{learn}' in said.splitlines()
    for i, o in enumerate(image_folder(photos/'val').paths):
        (place/'flat').mkdir(exist_ok=True); shutil.copy(o, place/'flat'/f'{i}{Path(o).suffix}')
    printed = job('recommend', place, *grid, '-p', 'images', place/'flat', '-p', 'square', True, '-p', 'whiten', False,
                  '-p', 'out', place/'ready-flat')
    assert 'strong copies of them, 8 of each' in printed and open_model(str(place/'ready-flat')).square is True

def test_a_whitened_model_keeps_its_crop(place, photos):
    "A square that was asked for stays with the model: opened, evaluated and searched as it was learned."
    job('whiten', place, '-p', 'images', photos/'val', '-p', 's', 320, '-p', 'square', True, '-p', 'out',
        place/'cropped')
    assert open_model(str(place/'cropped')).square is True
    job('search', place, '-p', 'images', photos/'val', '-p', 'model', place/'cropped', '-p', 'index', place/'index')
    record = Index.open(place/'index', load(place/'cropped')).manifest.record
    assert (record.s, record.square) == (320, True)
    assert open_extractor(str(place/'cropped')).square is True

@pytest.mark.parametrize('name, args, words', [
    ('recommend', ('images', '/nowhere'), "images='/nowhere' is not a folder"),
    ('recommend', ('ps', 'many'), "ps='many' must be numbers"),
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
WITHOUT = {'recommend': {'progress', 'square', 'ps', 'whiten'}, # None: several, as their defaults are
           'evaluate': {'name', 'data', 'images', 'ps', 'whiten', 'stated', 'folder', 'progress', 'fits',
                        'per_class', 'classes'},
           'whiten': {'name', 'root', 'progress'}, 'finetune_p': {'name', 'root', 'images', 'progress'}}
WORDS = {'dim': 'dims'}
CALLED = {'evaluate': (open_benchmark, score_benchmark), 'whiten': (whitened,), 'finetune_p': (finetune_p,),
          'recommend': (recommend,)}

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
