"`make paper` at the smallest scale: every notebook of nbs/paper, from nothing to the page."
import json, os, re, signal, subprocess, sys, time
from pathlib import Path
import pytest
from multigrain.claims import VERDICTS

ROOT = Path(__file__).parents[1]
NAMES = [o.stem for o in sorted((ROOT/'nbs/paper').glob('*.ipynb'))]

def command(runs, *words):
    return [sys.executable, '-m', 'multigrain.page', *words], dict(
        cwd=ROOT, env=os.environ | dict(OMP_NUM_THREADS='1', MULTIGRAIN_RUNS=str(runs)), text=True
    )

def paper(runs, *words):
    args, how = command(runs, *words)
    return subprocess.run(args, capture_output=True, **how)

def test_every_notebook_has_its_place():
    from multigrain.studies import NOTEBOOKS
    assert sorted(NOTEBOOKS) == NAMES

@pytest.fixture(scope='module')
def made(tmp_path_factory):
    "Killed once in the middle, then to the end."
    d = tmp_path_factory.mktemp('paper')
    words = '--preset', 'smoke', '--train', 'true', '--seeds', '1'
    words += '--out', str(d/'notebooks'), '--results', str(d/'results')
    args, how = command(d/'runs', *words)
    first = subprocess.Popen(
        args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, **how
    )
    for _ in range(600):
        if (
            len([o for o in (d / 'runs').glob('smoke-*/run.json') if json.loads(o.read_text())['complete']])
            >= 2
            or first.poll() is not None
        ):
            break
        time.sleep(.2)
    assert first.poll() is None
    os.killpg(first.pid, signal.SIGKILL); first.wait()
    kept = {o: o.stat().st_mtime_ns for o in (d/'runs').glob('smoke-*/model/model.safetensors')}
    done = paper(d/'runs', *words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(o.stat().st_mtime_ns == at for o, at in kept.items()) and len(kept) >= 2 # nothing is trained twice
    return d, words, done

def test_the_page(made):
    "It shows every table and figure, needs no other file, and says what the plan was."
    d, _, done = made
    assert 'runs' in done.stdout and 'views/s' in done.stdout and 'GB' in done.stdout
    text = (d/'notebooks/paper.html').read_text()
    from multigrain.studies import NOTEBOOKS
    assert [o for o in re.findall(r'<h2 id="(\w+)"', text)] == NOTEBOOKS
    assert 'http' not in re.sub(r'base64,[^"]*', '', text) and text.count('<img') >= 10
    for name in NOTEBOOKS:
        found = json.loads((d/'results'/f'{name}.json').read_text())
        assert all(o['verdict'] in VERDICTS for o in found['claims']), name
        assert found['claims'] and (d/'notebooks'/f'{name}.ipynb').exists(), name

def test_from_the_store(made):
    "Without training, everything is made again from the store; what is missing is listed as commands."
    d, words, _ = made
    done = paper(d/'runs', *words, '--train', 'false', '--names', 'table_p_star')
    assert done.returncode == 0, done.stderr
    done = paper(
        d / 'runs',
        '--preset',
        'smoke',
        '--seeds',
        '2',
        '--train',
        'false',
        '--names',
        'table_2',
        '--out',
        str(d / 'more'),
        '--results',
        str(d / 'more'),
    )
    assert (
        done.returncode == 1
        and 'python -m multigrain.training --preset smoke' in done.stderr
        and '--seed 1' in done.stderr
    )

MISTAKES = [('--preset papr', 'did you mean paper'), ('--preset paper', 'needs data'),
            ('--preset mini --names table_9', 'table_9'),
            ('--preset smoke --seed 3', 'did you mean seeds'),
            ('--preset paper --train true --data tests', 'no folder holidays')]

@pytest.mark.parametrize('words,says', MISTAKES)
def test_a_mistake_is_one_sentence(tmp_path, words, says):
    done = paper(tmp_path, *words.split())
    assert (
        done.returncode == 1
        and says in done.stderr
        and 'Traceback' not in done.stderr
        and not list(tmp_path.iterdir())
    )
