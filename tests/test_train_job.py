"`papermill nbs/train.ipynb` as people type it, at the smallest scale; and what names a run."
import ast, json, os, subprocess, sys
from dataclasses import asdict
from pathlib import Path
import pytest
from multigrain.launch import Machine, Place, find_run, make_request, parameter_names, rate_caution
from multigrain.recipe import ADDED_LATER, Recipe, fit_recipe, make_recipe, parameters
from multigrain.runs import run_hash

ROOT = Path(__file__).parents[1]

# The recipe: one list, and the names of runs that it decides.

def parameters_cell():
    "Parameters of the notebook and their defaults."
    cells = json.loads((ROOT/'nbs'/'train.ipynb').read_text())['cells']
    cell = next(c for c in cells if 'parameters' in c['metadata'].get('tags', []))
    assigned = [o for o in ast.parse(''.join(cell['source'])).body if isinstance(o, ast.Assign)]
    return {o.targets[0].id: ast.literal_eval(o.value) for o in assigned}

def test_the_notebook_has_the_parameters_of_the_recipe():
    cell = parameters_cell()
    assert list(cell) == parameter_names()
    assert make_request(**cell) == (make_recipe('mini'), Place(), Machine())
    assert all(cell[o] is None for o in asdict(Recipe()) if o != 'preset')

@pytest.mark.parametrize('given,name', [
    (dict(), 'smoke-1baa8281'), (dict(lam=1, m=1), 'smoke-2504d990'),
    (dict(sampling='published', learn_p=True), 'smoke-ae3f7a53')])
def test_names_of_runs_stay(given, name):
    "Names that were given by an earlier version."
    assert find_run(make_recipe('smoke', **given), Place(out='store')).folder == Path('store')/name

def test_stored_runs_have_the_names_of_their_parameters():
    files = sorted((ROOT/'data'/'paper'/'store').glob('tiny-*/run.json'))
    assert files
    for file in files:
        stored = json.loads(file.read_text())['parameters']
        assert parameters(Recipe(**stored)) == stored
        assert file.parent.name == f'tiny-{run_hash(parameters(Recipe(**stored)))}'

NEWER = [('group', 12), ('same_class', 'exclude'), ('bn_steps', 2), ('schedule', 'cosine'), ('head_lr', 10.),
         ('patience', 3)]

@pytest.mark.parametrize('field,value', NEWER)
def test_a_field_that_was_added_later_names_a_run_only_if_it_is_used(field, value):
    usual, other = make_recipe('smoke'), make_recipe('smoke', **{field: value})
    assert field in ADDED_LATER and field not in parameters(usual) and parameters(other)[field] == value
    assert run_hash(parameters(usual)) != run_hash(parameters(other))

# The job.

def papermill(tmp_path, *words):
    command = [sys.executable, '-m', 'papermill', ROOT/'nbs'/'train.ipynb', tmp_path/'out.ipynb',
               '-p', 'preset', 'smoke', '-p', 'out', tmp_path/'runs', *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path,
                          env=os.environ | dict(OMP_NUM_THREADS='1'))
    return done.returncode, done.stdout + done.stderr

def outputs(tmp_path):
    cells = json.loads((tmp_path/'out.ipynb').read_text())['cells']
    return [o for c in cells for o in c.get('outputs', [])]

@pytest.mark.parametrize('words,says', [
    (('-p', 'lam', '1.5'), 'lam=1.5'), (('-p', 'lamb', '0.5'), 'did you mean lam'),
    (('-p', 'm', '1'), 'no positive pair'), (('-p', 'trunk', 'resnet5O'), 'resnet50'),
    (('-p', 'epochs', 'many'), "epochs='many'"), (('-p', 'preset', 'mimi'), 'did you mean mini')])
def test_a_mistake_ends_the_job(tmp_path, words, says):
    code, err = papermill(tmp_path, *words)
    assert code == 1 and says in err and not (tmp_path/'runs').exists()

def test_the_job(tmp_path):
    "Live progress on the terminal, pictures and a result line in the notebook, the run in the store."
    code, err = papermill(tmp_path, '-p', 'lam', '0.5')
    assert code == 0, err
    assert 'epoch 2/2' in err and 'img/s' in err and 'beta' in err
    pink = [''.join(o['text']) for o in outputs(tmp_path) if o.get('name') == 'stderr'] # on a page
    assert 'epoch' not in ''.join(pink)
    run, = (tmp_path/'runs').glob('smoke-*')
    record = json.loads((run/'run.json').read_text())
    assert record['complete'] and record['parameters']['lam'] == .5
    names = {'k-NN top-1', 'Copies mAP', 'IN-aug'}
    assert record['result']['start'].keys() == record['result']['end'].keys() == names
    assert 'val_top1' in record['result']
    strange = 'Executing', 'Task was destroyed', 'task: <Task' # papermill's bar, and a kernel that ends
    lines = [o for o in err.splitlines() if o.strip() and not any(k in o for k in strange)]
    assert lines[-1].startswith('run: ') and run.name in lines[-1] # the terminal ends with where it is
    assert 'synthetic smoke val: ' in lines[-2] + lines[-3]
    text = ''.join(''.join(o.get('text', '')) for o in outputs(tmp_path))
    assert 'top-1' in text and 'IN-aug' in text and run.name in text
    assert any('image/png' in o.get('data', {}) for o in outputs(tmp_path))
    assert (run/'train.ipynb').exists()
    state = (run/'epoch.safetensors').stat().st_mtime_ns
    code, err = papermill(tmp_path, '-p', 'lam', '0.5') # a second call adds nothing
    assert code == 0 and (run/'epoch.safetensors').stat().st_mtime_ns == state
    assert len(list((tmp_path/'runs').glob('smoke-*'))) == 1

def test_the_yardstick_is_the_network_it_started_from(tmp_path):
    "A training that learns nothing ends where it started; one that destroys says so in the first line."
    still = '-p lr 0 -p beta_lr 0 -p batch_norm frozen -p name still'.split()
    code, err = papermill(tmp_path, *still)
    assert code == 0, err
    result = json.loads(next((tmp_path/'runs').glob('still-*/run.json')).read_text())['result']
    assert result['start'] == result['end']
    wild = '-p lr 0.5 -p weight_decay 1 -p momentum 0 -p name wild'.split() # shrinks all weights to nothing
    code, err = papermill(tmp_path, *wild)
    assert code == 0, err
    result = json.loads(next((tmp_path/'runs').glob('wild-*/run.json')).read_text())['result']
    worse = [k for k in result['end'] if result['end'][k] < result['start'][k] and k != 'k-NN top-1']
    assert 'Copies mAP' in worse and 'IN-aug' in worse and 'smoke val: BELOW the network it started from: ' in err

def test_a_rate_that_destroys_pretrained_weights_is_told():
    "Before the training starts, with the preset that is meant for this."
    job = ''.join(''.join(c['source']) for c in json.loads((ROOT/'nbs'/'train.ipynb').read_text())['cells'])
    assert job.index('rate_caution(recipe)') < job.index('run = train(')
    given = dict(trunk='lite0', pretrained=True)
    assert 'take preset=finetune' in rate_caution(make_request('mini', **given).recipe)
    for o in (make_request('finetune', data='smoke'), make_request('mini')): assert rate_caution(o.recipe) == ''

def test_a_finetuning_chooses_its_length(tmp_path):
    "The preset by name; steps and epochs come from the size of the set, the time is told before it starts."
    words = '-p preset finetune -p trunk mini -p pretrained False -p data smoke -p resolution 32'.split()
    code, err = papermill(tmp_path, *words)
    assert code == 0, err
    run, = (tmp_path/'runs').glob('finetune-*')
    record = json.loads((run/'run.json').read_text())
    assert record['parameters']['epochs'] == record['parameters']['iterations'] == 0
    fitted = fit_recipe(make_recipe('finetune', data='smoke'), 64)
    assert 'at the speed of this moment' in err.split('epoch 1/')[0]
    assert f'{fitted.epochs} epochs of {fitted.iterations} steps' in err
    assert record['result']['epochs'] <= fitted.epochs
