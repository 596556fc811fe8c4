"The frame: package and notebooks in step, notebooks clean, papermill tags safe, imports light, the wheel whole."
import ast, filecmp, json, os, shutil, subprocess, sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
NOTEBOOKS = sorted(p for p in (ROOT/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)
MODULES = sorted(p.stem for p in (ROOT/'multigrain').glob('[!_]*.py'))

def run(*args, cwd=ROOT, **kwargs):
    done = subprocess.run([str(a) for a in args], cwd=cwd, capture_output=True, text=True, timeout=600, **kwargs)
    assert done.returncode == 0, f'{args}\n{done.stdout}\n{done.stderr}'
    return done.stdout

@pytest.fixture(scope='module')
def copy(tmp_path_factory):
    "The project's files without what is ignored, in a folder of their own."
    to = tmp_path_factory.mktemp('copy')
    for name in ('nbs', 'multigrain'): shutil.copytree(ROOT/name, to/name, ignore=shutil.ignore_patterns('__pycache__', '.ipynb_checkpoints'))
    for name in ('settings.ini', 'setup.py', 'pyproject.toml', 'MANIFEST.in', 'README.md', 'LICENSE'): shutil.copy(ROOT/name, to/name)
    return to

def test_package_is_what_the_notebooks_export(copy):
    for old in (copy/'multigrain').rglob('*.py'):
        if old.name != '__init__.py': old.unlink()  # so that a module whose notebook is gone is missed
    run(BIN/'nbdev_export', cwd=copy)
    ours, theirs = ({p.relative_to(r): p.read_bytes() for p in r.rglob('*.py')} for r in (ROOT/'multigrain', copy/'multigrain'))
    assert ours.keys() == theirs.keys()
    assert [k for k in ours if ours[k] != theirs[k]] == [], 'run make export'

@pytest.mark.parametrize('nb', NOTEBOOKS, ids=lambda p: p.relative_to(ROOT/'nbs').as_posix())
def test_notebook_is_clean_and_small(nb, copy):
    mirror = copy/nb.relative_to(ROOT)
    run(BIN/'nbdev_clean', '--fname', mirror, cwd=copy)
    assert filecmp.cmp(nb, mirror, shallow=False), 'run make export'
    content = json.loads(nb.read_text())
    assert not any(o['output_type'] == 'error' for c in content['cells'] for o in c.get('outputs', []))
    assert nb.stat().st_size < 1_000_000

def test_clean_up_keeps_the_parameters_tag(tmp_path, copy):
    "Without the tag papermill would run every job with its defaults and say nothing."
    cell = dict(cell_type='code', id='a', execution_count=3, outputs=[], source=['lam = 0.5\n'], metadata=dict(tags=['parameters'], collapsed=True))
    nb = copy/'nbs'/'tagged.ipynb'
    nb.write_text(json.dumps(dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=5)))
    run(BIN/'nbdev_clean', '--fname', nb, cwd=copy)
    cleaned = json.loads(nb.read_text())['cells'][0]
    nb.unlink()
    assert cleaned['metadata'] == dict(tags=['parameters'])
    assert cleaned['execution_count'] is None

def test_readme_comes_from_index(tmp_path):
    run('make', 'readme', f'TO={tmp_path}')
    for made in (p for p in tmp_path.rglob('*') if p.is_file()): assert made.read_bytes() == (ROOT/made.relative_to(tmp_path)).read_bytes(), 'run make export'

def test_import_is_light_and_changes_nothing():
    code = '''
import sys, multigrain
assert not {"torch", "numpy", "pandas", "matplotlib"} & set(sys.modules), "import multigrain loads a library"
import importlib, torch, numpy as np, random
torch.manual_seed(1); np.random.seed(1); random.seed(1)
state = lambda: (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate(), torch.get_num_threads(), torch.get_default_dtype(),
                 torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.are_deterministic_algorithms_enabled())
before = state()
for m in sys.argv[1:]: importlib.import_module("multigrain." + m)
assert state() == before, "importing a module changed global state"
assert "matplotlib.pyplot" not in sys.modules, "a module loads pyplot on import"
'''
    run(sys.executable, '-c', code, *MODULES)

def test_public_names_have_a_docstring():
    for m in MODULES:
        for node in ast.parse((ROOT/'multigrain'/f'{m}.py').read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith('_'): assert ast.get_docstring(node), f'{m}.{node.name}'

def needed(requirements):
    "Distributions that these requirements pull in, directly or not."
    todo, found = [Requirement(r) for r in requirements], {}
    while todo:
        r = todo.pop()
        if r.name in found or (r.marker and not any(r.marker.evaluate({'extra': e}) for e in r.extras or {''})): continue
        try: found[r.name] = metadata.distribution(r.name)
        except metadata.PackageNotFoundError: continue
        todo += [Requirement(q) for q in found[r.name].requires or [] if 'extra ==' not in q or r.extras]
    return found.values()

def test_wheel_imports_in_an_environment_with_its_requirements_only(copy, tmp_path):
    run(sys.executable, '-m', 'build', '--wheel', '--outdir', tmp_path/'dist', copy)
    wheel = next((tmp_path/'dist').glob('*.whl'))
    run(sys.executable, '-m', 'venv', tmp_path/'env')
    python = tmp_path/'env'/'bin'/'python'
    run(python, '-m', 'pip', 'install', '--quiet', '--no-deps', wheel, cwd=tmp_path)
    site = Path(run(python, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))').strip())
    requires = json.loads(run(python, '-c', 'import json; from importlib.metadata import requires; print(json.dumps([r for r in requires("multigrain") if "extra ==" not in r]))'))
    for dist in needed(requires):  # links instead of a second install of several GB
        for top in {f.parts[0] for f in dist.files or [] if f.parts[0] not in ('..', '__pycache__')}:
            if not (site/top).exists(): os.symlink(dist.locate_file(top), site/top)
    out = run(python, '-c', 'import importlib, sys, multigrain; print(multigrain.__file__)\nfor m in sys.argv[1:]: importlib.import_module("multigrain." + m); print(m)', *MODULES, cwd=tmp_path)
    assert out.split()[0].startswith(str(site)) and out.split()[1:] == MODULES

def test_make_help_lists_every_target():
    listed = {line.split()[1] for line in run('make', '--no-print-directory', 'help').splitlines()}
    targets = {t for line in (ROOT/'Makefile').read_text().splitlines() if line.startswith('.PHONY:') for t in line.split()[1:]}
    assert listed == targets
