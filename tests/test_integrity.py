"Damage is noticed and changed data is noticed; what a training says when it is interrupted or something runs out."
import json, os, shutil, signal, subprocess, sys, time
from pathlib import Path

import numpy as np, pytest
from PIL import Image
from safetensors.torch import load_file, save_file
sys.path.insert(0, str(Path(__file__).parent))
from test_training import content, run, start, the_run, world # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parent.parent

@pytest.fixture(scope='module')
def begun(world, tmp_path_factory): # noqa: F811
    "A training that was killed in its second epoch, with both states; and the end of one that was not."
    out = tmp_path_factory.mktemp('begun')
    run(world, out/'whole')
    assert run(world, out/'part', 'update', 5, ok=False)[0] == -signal.SIGKILL
    assert {'epoch.safetensors', 'step.safetensors'} <= {o.name for o in the_run(out/'part').folder.iterdir()}
    return out/'part', content(out/'whole')

def copied(begun, to): # with the name that its parameters have
    shutil.copytree(begun[0], to, dirs_exist_ok=True)
    return the_run(to).folder

def flip(data, at): return data[:at] + bytes([data[at] ^ 4]) + data[at+1:]

def half(data): return data[:len(data)//2] + bytes(len(data) - len(data)//2) # of a power cut

DAMAGE = dict(flipped=lambda data: flip(data, len(data)//2), zeroed=half,
              cut=lambda data: data[:-100], header=lambda data: flip(data, 30))

@pytest.mark.parametrize('name,how', [('step', 'flipped'), ('epoch', 'zeroed'), ('step', 'cut'), ('epoch', 'header')])
def test_a_damaged_state_is_not_trained_on(world, begun, tmp_path, name, how): # noqa: F811
    "The run goes on from the other one, says so, and ends as if nothing had been; so with `timing.jsonl`."
    folder = copied(begun, tmp_path)
    file = folder/f'{name}.safetensors'
    file.write_bytes(DAMAGE[how](file.read_bytes()))
    (folder/'timing.jsonl').write_bytes(b'{"epoch": 0\xff')
    _, err = run(world, tmp_path)
    assert f'{name}.safetensors is damaged' in err and 'goes on from its other state' in err
    assert content(tmp_path) == begun[1]

def test_both_states_damaged(world, begun, tmp_path): # noqa: F811
    folder = copied(begun, tmp_path)
    for name in ('epoch', 'step'):
        file = folder/f'{name}.safetensors'
        file.write_bytes(flip(file.read_bytes(), -9))
    code, err = run(world, tmp_path, ok=False)
    assert code == 1 and 'epoch.safetensors is damaged' in err and len(err.strip().splitlines()) == 1

def test_states_of_earlier_versions_open(world, begun, tmp_path): # noqa: F811
    "Without a checksum and without a note of the images: two sentences, and the same end."
    folder = copied(begun, tmp_path)
    for file in folder.glob('*.safetensors'):
        data = file.read_bytes()
        text = json.loads(data[8:8 + int.from_bytes(data[:8], 'little')])['__metadata__']['info']
        save_file(load_file(file), file, dict(info=text.partition(' ')[2]))
    for file in folder.glob('*.npz'): file.unlink()
    _, err = run(world, tmp_path)
    assert 'without a checksum' in err and 'earlier versions did not write it' in err
    assert content(tmp_path) == begun[1]

@pytest.fixture
def own(world, tmp_path): # noqa: F811
    "A copy of the images, and a run on them that was killed."
    shutil.copytree(world, tmp_path/'data')
    run(tmp_path/'data', tmp_path/'out', 'update', 5, ok=False)
    return tmp_path/'data', tmp_path/'out', sorted(o for o in (tmp_path/'data/train').rglob('*') if o.is_file())[3]

def test_a_replaced_image_is_noticed(own):
    "Another picture of the same size in bytes and pixels; then the same one with another time."
    data, out, file = own
    whole = file.read_bytes()
    at = whole.index(b'\xff\xda') + 40
    file.write_bytes(flip(whole, at))
    assert Image.open(file).size
    code, err = run(data, out, ok=False)
    assert code == 1 and str(file) in err and 'is not what it was' in err and len(err.strip().splitlines()) == 1
    file.write_bytes(whole)
    run(data, out)
    assert the_run(out).complete

def heard(): signal.signal(signal.SIGINT, signal.SIG_DFL) # programs in the background of a shell ignore it

def alone(err): return [o for o in err.strip().splitlines() if o.strip()]

@pytest.mark.parametrize('processes,workers', [(1, 2), (2, 0)])
def test_ctrl_c_is_one_line(world, tmp_path, processes, workers): # noqa: F811
    "A terminal sends the signal to everybody; one line, and the same command goes on at once."
    given = dict(preset='smoke', data=world, out=tmp_path, iterations=200, epochs=3, progress='false', save_minutes=0,
                 processes=processes, workers=workers)
    words = [str(w) for k, v in given.items() for w in (f'--{k}', v)]
    p = subprocess.Popen([sys.executable, '-m', 'multigrain.launch', *words], text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, start_new_session=True, preexec_fn=heard,
                         env=os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT)))
    deadline = time.monotonic() + 180
    while not list(tmp_path.glob('smoke-*/step.safetensors')) and time.monotonic() < deadline: time.sleep(.05)
    os.killpg(p.pid, signal.SIGINT)
    _, err = p.communicate(timeout=60)
    says = 'interrupted: start the same command again, it goes on from the last state'
    assert p.returncode == 130 and alone(err) == [says]
    from multigrain.basics import locked
    with locked(the_run(tmp_path).folder): pass # nobody holds it any more

def test_the_lock_of_a_killed_training_is_free_at_once(world, tmp_path): # noqa: F811
    "Though its workers live on for some seconds."
    from multigrain.basics import locked
    p = start(world, tmp_path, iterations=500, epochs=3, workers=2, cache='false')
    deadline = time.monotonic() + 180
    while not list(tmp_path.glob('smoke-*/step.safetensors')) and time.monotonic() < deadline: time.sleep(.05)
    children = subprocess.run(['ps', '--ppid', str(p.pid), '-o', 'pid='], capture_output=True, text=True).stdout.split()
    with pytest.raises(RuntimeError, match='another process'): locked(the_run(tmp_path).folder).__enter__()
    p.kill(); p.wait()
    with locked(the_run(tmp_path).folder): pass
    alive = [o for o in children if Path(f'/proc/{o}').exists()]
    p.stdout.close(); p.stderr.close()
    assert len(children) >= 2 and alive, 'the workers were gone: this says nothing'

LOADS = '''
import sys
from multigrain.readers import image_folder
from multigrain.loading import train_loader
try:
    images = image_folder(sys.argv[1], cache=False)
    for batch in train_loader(images, s=224, batch_size=48, m=3, iterations=40, workers=2): pass
    print('loaded')
except (RuntimeError, OSError) as e: print(e, flush=True)
'''

@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp('photos')
    for i in range(48):
        noise = np.random.default_rng(i).integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((320, 240)).save(root/f'{i}.jpg')
    return root

def said(command, **how):
    done = subprocess.run(command, capture_output=True, text=True, timeout=180,
                          env=os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT)), **how)
    return done.stdout.strip(), done.returncode

def test_a_small_shared_memory_is_one_sentence(photos):
    small = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$0" "$@"'
    if subprocess.run(['unshare', '-m', 'sh', '-c', small, 'true'], capture_output=True).returncode:
        pytest.skip('no rights to mount a small /dev/shm')
    text, _ = said(['unshare', '-m', 'sh', '-c', small, sys.executable, '-c', LOADS, str(photos)])
    assert text.startswith('workers=2, loading photos') and '/dev/shm is full' in text and '\n' not in text
