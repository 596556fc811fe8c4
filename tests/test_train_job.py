"`papermill nbs/train.ipynb` as people type it, at the smallest scale."
import json, os, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).parents[1]

def papermill(tmp_path, *words):
    done = subprocess.run([sys.executable, '-m', 'papermill', ROOT/'nbs'/'train.ipynb', tmp_path/'out.ipynb', '-p', 'preset', 'smoke', '-p', 'out', tmp_path/'runs', *words],
                          capture_output=True, text=True, cwd=tmp_path, env=os.environ | dict(OMP_NUM_THREADS='1'))
    return done.returncode, done.stderr

def outputs(tmp_path):
    cells = json.loads((tmp_path/'out.ipynb').read_text())['cells']
    return [o for c in cells for o in c.get('outputs', [])]

@pytest.mark.parametrize('words,says', [(('-p', 'lam', '1.5'), 'lam=1.5'), (('-p', 'lamb', '0.5'), 'did you mean lam'), (('-p', 'm', '1'), 'no positive pair'), (('-p', 'trunk', 'resnet5O'), 'resnet50'),
                                        (('-p', 'epochs', 'many'), "epochs='many'"), (('-p', 'preset', 'mimi'), 'did you mean mini')])
def test_a_mistake_ends_the_job(tmp_path, words, says):
    code, err = papermill(tmp_path, *words)
    assert code == 1 and says in err and not (tmp_path/'runs').exists()

def test_the_job(tmp_path):
    "Live progress on the terminal, pictures and a result line in the notebook, the run in the store; a second call adds nothing."
    code, err = papermill(tmp_path, '-p', 'lam', '0.5')
    assert code == 0, err
    assert 'epoch 2/2' in err and 'img/s' in err and 'beta' in err
    runs = list((tmp_path/'runs').iterdir())
    record = json.loads((runs[0]/'run.json').read_text())
    assert len(runs) == 1 and record['complete'] and record['parameters']['lam'] == .5 and {'val_top1', 'in_aug', 'in_aug_untrained'} <= record['result'].keys()
    text = ''.join(''.join(o.get('text', '')) for o in outputs(tmp_path))
    assert 'top-1' in text and 'IN-aug' in text and runs[0].name in text
    assert any('image/png' in o.get('data', {}) for o in outputs(tmp_path))
    assert (runs[0]/'train.ipynb').exists()
    state = (runs[0]/'epoch.safetensors').stat().st_mtime_ns
    code, err = papermill(tmp_path, '-p', 'lam', '0.5')
    assert code == 0 and (runs[0]/'epoch.safetensors').stat().st_mtime_ns == state and len(list((tmp_path/'runs').iterdir())) == 1
