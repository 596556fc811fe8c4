"The whole plan of the paper, rehearsed on folders of the real size: four processes, and everything that can go wrong."
import json, os, resource, shutil, subprocess, sys
from pathlib import Path

import pytest
from multigrain import page, rehearse
from multigrain.studies import STUDIES, arm_recipe, find_study, run_name
from test_full_scale import whole # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
KILL = '''
import os
if os.environ.get('RANK') == '2' and not os.path.exists(os.environ['KILLED']):
    import torch
    open(os.environ['KILLED'], 'w').close()
    def step(*args, **kwargs): os.kill(os.getpid(), 9)
    torch.optim.SGD.step = step
'''

@pytest.fixture(scope='module')
def project(tmp_path_factory):
    "A project with four notebooks; one of them is broken."
    root = tmp_path_factory.mktemp('project')
    for o in ('data', 'multigrain'): (root/o).symlink_to(ROOT/o)
    (root/'nbs/paper').mkdir(parents=True)
    names = 'table_p_star', 'figure_a2_a3', 'table_2', 'table_3'
    for o in ('settings.ini', *(f'nbs/paper/{k}.ipynb' for k in names)): shutil.copy(ROOT/o, root/o)
    broken = json.loads((root/'nbs/paper/figure_a2_a3.ipynb').read_text())
    broken['cells'][1]['source'] = ['raise ValueError("no such colour")']
    (root/'nbs/paper/figure_a2_a3.ipynb').write_text(json.dumps(broken))
    (root/'hook').mkdir()
    (root/'hook/sitecustomize.py').write_text(KILL)
    return root

def rehearsed(project, data, limit=0, kill=False, names='table_2,table_p_star,figure_a2_a3'):
    "The command, as it is typed; nothing can be downloaded."
    words = dict(preset='paper', data=data, names=names, processes=4, trunk='mini',
                 resolution=32, batch_size=32, group=8, out=project/'out')
    found = [str(w) for k, v in words.items() for w in (f'--{k}', v)]
    path = [str(project/'hook')]*kill + [str(ROOT)]
    env = os.environ | dict(OMP_NUM_THREADS='1', TORCH_HOME=str(project/'hub'), PYTHONPATH=':'.join(path),
                            KILLED=str(project/'killed'), https_proxy='http://127.0.0.1:9')
    def small_disk(): resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return subprocess.run([sys.executable, '-m', 'multigrain.rehearse', *found], cwd=project, env=env, text=True,
                          capture_output=True, preexec_fn=small_disk if limit else None, timeout=3600)

def stamps(folder):
    "When the files of runs and results were written."
    kinds = 'runs/*/model/model.safetensors', 'runs/*/scores.json', 'results/*.json', 'notebooks/*.ipynb'
    return {o: o.stat().st_mtime_ns for kind in kinds for o in folder.glob(kind)}

FEW = [f'{o}: {n} images of the paper, so scores {why} do not compare with it' for o, n, why in (
    ('distractors', '100 of the 10,000', 'of copydays'), ('whiten', '200 of the 20,000', 'with whitening'))]

def missing(done):
    "The sentences at the end of a rehearsal: what the real thing would not give."
    text = done.stdout.split('WILL BE MISSING:\n')[1].split('the real thing')[0]
    return [o.strip() for o in text.strip().splitlines()]

def fake_weights(project):
    "A ResNet-50 of a thousand classes where torchvision keeps its weights: random numbers."
    import torch
    from torchvision.models import ResNet50_Weights, resnet50
    file = project/'hub/hub/checkpoints'/Path(ResNet50_Weights.IMAGENET1K_V1.url).name
    file.parent.mkdir(parents=True)
    torch.save(resnet50().state_dict(), file)

@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get('REHEARSAL'), reason='takes many minutes: make rehearsal')
def test_a_rehearsal_that_goes_wrong_in_every_way(project, whole): # noqa: F811
    "What goes wrong is said, the rest is made; started again, only what is missing is done."
    first = rehearsed(project, whole, kill=True)
    said = first.stdout
    assert first.returncode == 1 and 'Traceback' not in first.stderr, first.stderr[-3000:]
    assert 'WILL BE MISSING' in said and 'ended early' in said                    # a killed process
    assert 'figure_a2_a3: ValueError: no such colour' in said                     # a broken notebook
    assert "table_2: resnet50: pretrained=True, but the weights" in said          # a missing weight file
    assert 'memory: 8 views' in said and 'it fits' in said and 'hours of training' in said and 'disk:' in said
    names = 'NAMES=table_2,table_p_star,figure_a2_a3'
    assert f'the real thing: make paper PRESET=paper DATA={whole} {names} PROCESSES=4' in said
    kept = stamps(project/'out')
    assert len([o for o in kept if o.name == 'model.safetensors']) == 1           # the other run is complete

    shutil.copy(ROOT/'nbs/paper/figure_a2_a3.ipynb', project/'nbs/paper/figure_a2_a3.ipynb')
    full = rehearsed(project, whole, limit=100_000)                               # a full disk
    assert full.returncode == 1 and 'cannot write' in full.stdout, full.stdout[-2000:] + full.stderr[-2000:]
    assert all(stamps(project/'out')[o] == at for o, at in kept.items() if 'runs' in o.parts)

    last = rehearsed(project, whole)
    lost = missing(last)
    assert last.returncode == 1 and lost[:2] == FEW, last.stdout[-3000:]
    assert len(lost) == 3 and lost[2].startswith('table_2: resnet50'), last.stdout[-3000:]
    done = stamps(project/'out')
    assert all(done[o] == at for o, at in kept.items() if 'runs' in o.parts)       # nothing is trained twice
    assert {o.stem for o in (project/'out/results').glob('*.json')} == {'table_p_star', 'figure_a2_a3'}
    for o in (project/'out/runs').glob('paper-*/run.json'):
        assert json.loads(o.read_text())['computed'][-1] == dict(processes=4, parts=1, precision='float32')

    again = rehearsed(project, whole)
    assert stamps(project/'out') == done and 'rehearsed 2 notebooks' in again.stdout # and nothing is repeated

@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get('REHEARSAL'), reason='takes many minutes: make rehearsal')
def test_a_rehearsal_that_ends_well(project, whole): # noqa: F811
    "Classification with a network of others and retrieval: all is made, and only images that are too few are missing."
    fake_weights(project)
    done = rehearsed(project, whole, names='table_2,table_3')
    assert missing(done) == FEW and 'rehearsed 2 notebooks' in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
    results = {o.stem: json.loads(o.read_text()) for o in (project/'out/results').glob('table_[23].json')}
    assert {len(o['claims']) > 4 for o in results.values()} == {True} and len(results) == 2
    scores = json.loads((project/'out/runs/off-the-shelf/resnet50/scores.json').read_text())
    assert {'val 32', 'val 48', 'val 64'} <= scores.keys()
    assert 'images: 0.0 GB of train and val are read once' in done.stdout

def test_settings_of_the_machine_do_not_rename_runs(tmp_path):
    "Precision and processes can be chosen by memory: the runs are found all the same."
    plain = find_study('paper', str(tmp_path))
    for study in (page.on_machine(plain, 4), page.on_machine(plain, 1, 'bfloat16')):
        assert run_name(study, 'AA p=3', 0) == run_name(plain, 'AA p=3', 0)
    assert arm_recipe(page.on_machine(plain, 1, 'bfloat16'), 'AA p=3', 0).precision == 'bfloat16'

def test_a_rehearsal_is_short_and_keeps_the_recipe(tmp_path):
    "Two epochs of two steps; batches, groups, arms and resolutions stay."
    (tmp_path/'rehearsal.json').write_text(json.dumps(dict(common=rehearse.SHORT, s=[224, 500, 800], sets=['ukbench'])))
    small, whole = find_study('paper', str(tmp_path)), find_study('paper', str(ROOT)) # noqa: F811
    assert small.s == STUDIES['paper'].s and small.sets == ('ukbench',)
    for arm in ('uniform p=1', 'AA p=3', 'published sampling'):
        a, b = (arm_recipe(o, arm, 0) for o in (small, whole))
        assert (a.iterations, a.epochs, a.drops) == (2, 2, (1,))
        same = 'lam m p augmentation batch_size group batch_norm trunk resolution sampling lr'.split()
        assert [getattr(a, o) for o in same] == [getattr(b, o) for o in same]
