"A notebook run by papermill: what it accepts, and that it stops on what it does not know."
import os, subprocess, sys
from pathlib import Path

import nbformat, pytest
from nbformat.v4 import new_code_cell, new_notebook
from papermill import inspect_notebook

ROOT = Path(__file__).resolve().parent.parent

@pytest.fixture(scope='module')
def job(tmp_path_factory):
    "A tiny job: an earlier variable, two parameters, the check, a result."
    cells = [new_code_cell('from multigrain.job import declare, check\nsteps = 200'),
             new_code_cell('lam = 0.5  # weight\nm = 3  # repetitions\ndeclare(namespace=globals())',
                           metadata=dict(tags=['parameters'])),
             new_code_cell('print("checked", check(globals()))')]
    kernel = dict(name='python3', language='python', display_name='python3')
    nb = new_notebook(cells=cells, metadata=dict(kernelspec=kernel))
    path = tmp_path_factory.mktemp('job')/'job.ipynb'
    nbformat.write(nb, path)
    return path

def papermill(notebook, *args, cwd=None):
    "Run it as a user does; the finished process and the text that the cells printed."
    out = Path(cwd or notebook.parent)/f'out-{abs(hash(args))}.ipynb'
    command = [sys.executable, '-m', 'papermill', str(notebook), str(out), '--no-progress-bar', *map(str, args)]
    env = os.environ | dict(PYTHONPATH=str(ROOT)) # this tree, installed or not
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=env)
    if not out.exists(): return done, ''
    outputs = [o for c in nbformat.read(out, 4).cells if c.cell_type == 'code' for o in c.outputs]
    return done, ''.join(o.get('text', '') for o in outputs)

def test_known_parameters_pass_in_the_type_of_their_default(job):
    done, printed = papermill(job, '-p', 'lam', 1, '-p', 'm', 4.0)
    assert done.returncode == 0, done.stderr
    assert "checked {'lam': 1.0, 'm': 4}" in printed

@pytest.mark.parametrize('args, message', [
    (('-p', 'lamda', 0.3), 'lamda (did you mean lam?)'),
    (('-p', 'steps', 5),   'not a parameter of this notebook: steps'),  # a variable of an earlier cell
    (('-p', 'lam', 'high'), "lam='high' must be a number"),
    (('-p', 'm', 2.5),     'm=2.5 must be a whole number')])
def test_a_mistake_stops_the_job_and_is_named(job, args, message):
    done, printed = papermill(job, *args)
    assert done.returncode != 0
    assert message in done.stderr
    assert 'checked' not in printed

def test_help_lists_the_parameters_and_nothing_else(job):
    shown = {k: (v['default'], v['help']) for k, v in inspect_notebook(job).items()}
    assert shown == dict(lam=('0.5', 'weight'), m=('3', 'repetitions'))

def tags(cell): return cell.metadata.get('tags', [])

def jobs():
    "Every notebook of the project with a cell tagged `parameters`, and its code cells."
    for path in sorted((ROOT/'nbs').rglob('*.ipynb')):
        cells = [c for c in nbformat.read(path, 4).cells if c.cell_type == 'code']
        cells = [c for c in cells if 'injected-parameters' not in tags(c)] # of jobs that are stored as they ran
        if any('parameters' in tags(c) or 'declare(namespace' in c.source for c in cells): yield path, cells

def test_every_job_of_the_project_declares_and_checks():
    found = {path.relative_to(ROOT/'nbs').as_posix(): cells for path, cells in jobs() if path.stem != '34_job'}
    assert '06_toy_svm.ipynb' in found
    for name, cells in found.items():
        tagged = [i for i, c in enumerate(cells) if 'parameters' in tags(c)]
        assert len(tagged) == 1, f'{name}: one cell is tagged parameters'
        defaults, following = cells[tagged[0]], cells[tagged[0]+1]
        assert defaults.source.splitlines()[-1].startswith('declare(namespace=globals())'), name
        assert 'check(globals())' in following.source, name
        listed = inspect_notebook(ROOT/'nbs'/name)
        shown = [v['help'] and 'declare' not in v['default'] for v in listed.values()]
        assert shown and all(shown), f'{name}: every parameter has its line and comment'

def test_toy_study_from_another_folder(tmp_path):
    toy, figure = ROOT/'nbs'/'06_toy_svm.ipynb', tmp_path/'new'/'toy.png'
    done, printed = papermill(toy, '-p', 'n', 10, '-p', 'runs', 5, '-p', 'figure', figure, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert figure.read_bytes()[:4] == b'\x89PNG'
    assert 'After 20 steps: uniform' in printed

def test_toy_study_names_a_bad_value(tmp_path):
    done, printed = papermill(ROOT/'nbs'/'06_toy_svm.ipynb', '-p', 'augmentation', 'print', cwd=tmp_path)
    assert done.returncode != 0
    assert "augmentation='print'" in done.stderr and 'did you mean printed?' in done.stderr
