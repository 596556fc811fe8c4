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
    for name in ('nbs', 'multigrain'):
        shutil.copytree(
            ROOT / name, to / name, ignore=shutil.ignore_patterns('__pycache__', '.ipynb_checkpoints')
        )
    for name in ('settings.ini', 'setup.py', 'pyproject.toml', 'MANIFEST.in', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / name, to / name)
    return to

def test_package_is_what_the_notebooks_export(copy):
    for old in (copy/'multigrain').rglob('*.py'):
        if old.name != '__init__.py': old.unlink()  # so that a module whose notebook is gone is missed
    run(BIN/'nbdev_export', cwd=copy)
    ours, theirs = (
        {p.relative_to(r): p.read_bytes() for p in r.rglob('*.py')}
        for r in (ROOT / 'multigrain', copy / 'multigrain')
    )
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
    cell = dict(
        cell_type='code',
        id='a',
        execution_count=3,
        outputs=[],
        source=['lam = 0.5\n'],
        metadata=dict(tags=['parameters'], collapsed=True),
    )
    nb = copy/'nbs'/'tagged.ipynb'
    nb.write_text(json.dumps(dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=5)))
    run(BIN/'nbdev_clean', '--fname', nb, cwd=copy)
    cleaned = json.loads(nb.read_text())['cells'][0]
    nb.unlink()
    assert cleaned['metadata'] == dict(tags=['parameters'])
    assert cleaned['execution_count'] is None

def test_readme_comes_from_index(tmp_path):
    run('make', 'readme', f'TO={tmp_path}')
    for made in (p for p in tmp_path.rglob('*') if p.is_file()):
        assert made.read_bytes() == (ROOT / made.relative_to(tmp_path)).read_bytes(), 'run make export'

def test_import_is_light_and_changes_nothing():
    code = '''
import sys, multigrain
assert not {"torch", "numpy", "pandas", "matplotlib"} & set(sys.modules), "import multigrain loads a library"
import importlib, torch, numpy as np, random
torch.manual_seed(1); np.random.seed(1); random.seed(1)
cudnn = torch.backends.cudnn
def state():
    return (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate(), torch.get_num_threads(),
            torch.get_default_dtype(), cudnn.benchmark, cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled())
before = state()
for m in sys.argv[1:]: importlib.import_module("multigrain." + m)
assert state() == before, "importing a module changed global state"
assert "matplotlib.pyplot" not in sys.modules, "a module loads pyplot on import"
'''
    run(sys.executable, '-c', code, *MODULES)

def test_public_names_have_a_docstring():
    for m in MODULES:
        for node in ast.parse((ROOT/'multigrain'/f'{m}.py').read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith('_'):
                assert ast.get_docstring(node), f'{m}.{node.name}'

def needed(requirements):
    "Distributions that these requirements pull in, directly or not."
    todo, found = [Requirement(r) for r in requirements], {}
    while todo:
        r = todo.pop()
        if r.name in found or (r.marker and not any(r.marker.evaluate({'extra': e}) for e in r.extras or {''})):
            continue
        try: found[r.name] = metadata.distribution(r.name)
        except metadata.PackageNotFoundError: continue
        todo += [Requirement(q) for q in found[r.name].requires or [] if 'extra ==' not in q or r.extras]
    return found.values()

@pytest.fixture(scope='module')
def plain(copy, tmp_path_factory):
    "Python of an environment with the wheel and its plain requirements only, by links: no second torch."
    d = tmp_path_factory.mktemp('plain')
    run(sys.executable, '-m', 'build', '--wheel', '--outdir', d/'dist', copy)
    run(sys.executable, '-m', 'venv', d/'env')
    python = d/'env'/'bin'/'python'
    run(python, '-m', 'pip', 'install', '--quiet', '--no-deps', next((d/'dist').glob('*.whl')), cwd=d)
    site = Path(run(python, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))').strip())
    code = 'import json; from importlib.metadata import requires; print(json.dumps(requires("multigrain")))'
    requires = [r for r in json.loads(run(python, '-c', code, cwd=d)) if 'extra ==' not in r]
    for dist in needed(requires):
        for top in {f.parts[0] for f in dist.files or [] if f.parts[0] not in ('..', '__pycache__')}:
            if not (site/top).exists(): os.symlink(dist.locate_file(top), site/top)
    run(python, '-m', 'ipykernel', 'install', '--prefix', d/'env', '--name', 'python3', cwd=d)
    return python

def test_wheel_imports_in_an_environment_with_its_requirements_only(plain, tmp_path):
    code = ('import importlib, sys, multigrain; print(multigrain.__file__)\n'
            'for m in sys.argv[1:]: importlib.import_module("multigrain." + m); print(m)')
    out = run(plain, '-c', code, *MODULES, cwd=tmp_path)
    assert out.split()[0].startswith(str(plain.parent.parent)) and out.split()[1:] == MODULES
    assert (Path(out.split()[0]).parent/'py.typed').exists()
    missing = subprocess.run([plain, '-c', 'import timm'], capture_output=True, cwd=tmp_path)
    assert missing.returncode, 'an extra is there: this environment says nothing'

@pytest.mark.slow
def test_plain_installation_runs_notebooks_and_explorers(plain, copy, tmp_path):
    "What the user's card promises after `pip install -e .` alone."
    env = {k: v for k, v in os.environ.items() if not k.startswith('JUPYTER')}
    env |= dict(JUPYTER_PATH=str(plain.parent.parent/'share/jupyter'), MULTIGRAIN_RUNS=str(tmp_path/'runs'),
                OMP_NUM_THREADS='1', PATH=f'{plain.parent}:{os.environ["PATH"]}')
    shutil.copytree(ROOT/'data/paper', copy/'data/paper', dirs_exist_ok=True)
    for name in ('paper.json', 'claims.json'): shutil.copy(ROOT/'data'/name, copy/'data'/name)
    toy = 'nbs/paper/figure_a2_a3.ipynb'
    run(plain, '-m', 'papermill', toy, tmp_path/'toy.ipynb', '-p', 'out', tmp_path/'results', cwd=copy, env=env)
    assert (tmp_path/'results/figure_a2_a3.png').exists()
    test = 'from nbdev.test import nbdev_test; nbdev_test("nbs/01_gem.ipynb", n_workers=0)'
    run(plain, '-c', test, cwd=copy, env=env)
    code = ('from multigrain.explore_heatmaps import explore; e = explore().wait()\n'
            'print(e.row.places[0].image.value[:2] == b"\\xff\\xd8", e.w.message.value)')
    assert run(plain, '-c', code, cwd=copy, env=env).startswith('True')

def test_constraints_hold_what_is_required():
    "Every requirement, of extras too, has a version there that satisfies it."
    import configparser
    pinned = dict(o.split('==') for o in (ROOT/'constraints.txt').read_text().splitlines() if '==' in o)
    pinned = {k.lower().replace('_', '-'): v for k, v in pinned.items()}
    ini = configparser.ConfigParser(delimiters=['='])
    ini.read(ROOT/'settings.ini', encoding='utf-8')
    for key in ('', 'dev_', 'lite0_', 'networks_', 'timm_', 'docs_'):
        for line in ini['DEFAULT'][key + 'requirements'].split():
            r = Requirement(line)
            assert r.specifier.contains(pinned[r.name.lower().replace('_', '-')]), line

def test_lab_cleans_on_save():
    "A notebook that was run and saved is what it was: no counts, no widgets, no metadata of Lab."
    import importlib.util
    spec = importlib.util.spec_from_file_location('lab', ROOT/'nbs/lab/jupyter_server_config.py')
    spec.loader.exec_module(lab := importlib.util.module_from_spec(spec))
    stored = json.loads((ROOT/'nbs/01_gem.ipynb').read_text())
    noisy = json.loads(json.dumps(stored))
    noisy['metadata'] |= dict(language_info=dict(name='python', version='3.11.7'), widgets={})
    for i, c in enumerate(o for o in noisy['cells'] if o['cell_type'] == 'code'):
        c['metadata'] |= dict(collapsed=True, execution={})
        c['execution_count'] = i
        for o in c['outputs']:
            if 'execution_count' in o: o['execution_count'] = i
        c['outputs'].append(dict(output_type='display_data', metadata={}, data={lab.WIDGET: dict(model_id='x')}))
    os.environ['MULTIGRAIN_ROOT'] = str(ROOT)
    lab.clean_on_save(model=dict(type='notebook', content=noisy), path='nbs/01_gem.ipynb')
    assert noisy == stored
    env = os.environ | dict(JUPYTER_CONFIG_PATH=str(ROOT/'nbs/lab'))
    assert 'clean_on_save' in run(BIN/'jupyter', 'lab', '--show-config', env=env)

def test_code_of_the_readme_runs(tmp_path):
    "The lines that search a folder of photographs, as they stand there."
    import re
    from multigrain.datasets import open_picture, pictures
    from PIL import Image
    block, = re.findall(r'```python\n(.*?)```', (ROOT/'README.md').read_text(), re.S)
    (tmp_path/'photos').mkdir()
    for i, name in enumerate(['cat', *list(pictures())[:3]]):
        picture = open_picture(next(iter(pictures())) if name == 'cat' else name)
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(tmp_path/'photos'/(f'{name if not i else i}.jpg'))
    out = run(sys.executable, '-c', block, cwd=tmp_path)
    assert out.splitlines()[0].startswith('1.00 ') and len(out.splitlines()) >= 3
    assert len((ROOT/'README.md').read_text().split()) < 1000

def stored_text(name):
    "All text of the stored outputs of a notebook."
    cells = json.loads((ROOT/'nbs'/name).read_text())['cells']
    outputs = [o for c in cells for o in c.get('outputs', [])]
    return ''.join(''.join([*o.get('text', []), *o.get('data', {}).get('text/plain', [])]) for o in outputs)

def test_origin_of_every_photograph_is_shown():
    "File, photographer, licence and package, in the stored table; the guide shows the photographs at work."
    known = json.loads((ROOT/'multigrain'/'photos.json').read_text())
    lines = {o.split()[0]: o for o in stored_text('15_photos.ipynb').splitlines() if o.strip()}
    assert len(known['photos']) == 84
    for o in known['photos']:
        line = lines[Path(o['file']).name]
        words = o['label'], o['by'], o['licence'], known['packages'][o['package']]['name']
        assert all(word in line for word in words), (words, line)
    guide = stored_text('guides/own_images.ipynb')
    assert '5 classes' in guide and 'brick court' in guide and 'Drawn images' not in guide

def test_make_help_lists_every_target():
    listed = {line.split()[1] for line in run('make', '--no-print-directory', 'help').splitlines()}
    targets = {
        t
        for line in (ROOT / 'Makefile').read_text().splitlines()
        if line.startswith('.PHONY:')
        for t in line.split()[1:]
    }
    assert listed == targets
