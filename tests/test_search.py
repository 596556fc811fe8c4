"The index in real processes: killed at every step and while embedding, two writers, hostile files, grown or built."
import json, os, shutil, signal, subprocess, sys, time
from pathlib import Path

import numpy as np, pytest
from PIL import Image
from multigrain.model import MultiGrain
from multigrain.search import Index

ROOT = Path(__file__).resolve().parent.parent
HOW = dict(s=32, batch_size=2, progress=False, thumbnail=16)
pytestmark = pytest.mark.filterwarnings('ignore:.*images are left out')

def model(): return MultiGrain('mini', n_classes=4)

def draw(folder, numbers, shift=0):
    "Synthetic pictures."
    folder.mkdir(parents=True, exist_ok=True)
    for i in numbers:
        noise = np.random.default_rng(i + shift).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((40, 36), Image.Resampling.BICUBIC).save(folder/f'{i:03}.png')
    return folder

def state(index):
    "What an index holds."
    return dict(paths=[Path(o).name for o in index.paths], vectors=np.array(index.near.embeddings),
                labels=index.rows['label'].tolist(),
                thumbnails=[index.thumbnail(i).tobytes() for i in range(len(index))])

def same(a, b):
    assert a['paths'] == b['paths'] and a['labels'] == b['labels'] and a['thumbnails'] == b['thumbnails']
    assert np.allclose(a['vectors'], b['vectors'], atol=1e-5)

def start(tmp_path, body, *arguments, processes=1):
    "A script in processes of its own."
    head = f'import sys, time\nsys.path.insert(0, {str(ROOT/"tests")!r})\nfrom test_search import *\n'
    script, env = tmp_path/'script.py', os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT))
    script.write_text(f'{head}import warnings\nwarnings.simplefilter("ignore")\n{body}')
    several = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
    return subprocess.Popen([sys.executable, *several*(processes > 1), str(script), *map(str, arguments)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

EVERYWHERE = '''
root = Path(sys.argv[1])
def change(folder, which): # what the killed process does
    if which == 'build': return Index.build(root/'photos', model(), folder, **HOW)
    index = Index.open(folder)
    index.add(root/'more', batch_size=2, progress=False) if which == 'add' else index.remove(index.paths[1:3])

def child(folder, which, steps):
    "Change the index, and die by SIGKILL before a certain flush to disk, rename or removal."
    left = [steps]
    def dying(f):
        def g(*a, **k):
            left[0] -= 1
            if left[0] == 0: os.kill(os.getpid(), signal.SIGKILL)
            return f(*a, **k)
        return g
    os.fsync, os.replace, shutil.rmtree = map(dying, (os.fsync, os.replace, shutil.rmtree))
    change(folder, which)
    os._exit(0)

def everywhere(which):
    results = []
    while not results or results[-1][0]:
        folder = root/f'{which}{len(results)}'
        if which != 'build': shutil.copytree(root/'index', folder)
        pid = os.fork()
        if pid == 0:
            try: child(folder, which, len(results) + 1)
            except BaseException: import traceback; traceback.print_exc()
            os._exit(1)
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        results.append([os.WIFSIGNALED(status) and os.WTERMSIG(status), str(folder)])
    return results
print(json.dumps({o: everywhere(o) for o in ('build', 'add', 'remove')}))
'''

@pytest.fixture(scope='module')
def killed(tmp_path_factory):
    "Folders whose writers were killed, one for every step; the last one was not."
    tmp = tmp_path_factory.mktemp('killed')
    draw(tmp/'photos', range(6)), draw(tmp/'more', range(10, 13))
    Index.build(tmp/'photos', model(), tmp/'index', **HOW)
    done = start(tmp, EVERYWHERE, tmp)
    out, err = done.communicate(timeout=200)
    assert done.returncode == 0, err
    return tmp, json.loads(out)

@pytest.mark.parametrize('which', ['build', 'add', 'remove'])
def test_killed_at_every_step(killed, which):
    "SIGKILL before every flush, rename and removal: the old state or the new one; the next call finishes the work."
    tmp, results = killed[0], killed[1][which]
    assert all(r[0] == signal.SIGKILL for r in results[:-1]) and len(results) > 8, results
    old = None if which == 'build' else state(Index.open(tmp/'index'))
    new, seen = state(Index.open(results[-1][1])), []
    for i, (_, folder) in enumerate(results[:-1]):
        try: now = Index.open(folder)
        except ValueError as e:
            assert which == 'build' and ('holds no index' in str(e) or 'is not a folder' in str(e)), e
            seen.append('nothing')
        else:
            seen.append('old' if old and len(now) == len(old['paths']) else 'new')
            same(state(now), old if seen[-1] == 'old' else new)
        if i % 3: continue
        if which == 'build': now = Index.build(tmp/'photos', model(), folder, **HOW)
        elif which == 'add': now.add(tmp/'more', batch_size=2, progress=False)
        elif seen[-1] == 'old': now.remove(now.paths[1:3])
        same(state(Index.open(folder)), new)
        if seen[-1] != 'new': assert not [o for o in Path(folder).iterdir() if o.name.startswith('.work')]
    in_order = seen == sorted(seen, key=['nothing', 'old', 'new'].index)
    assert in_order and len({*seen}) == 2, 'the change must happen in one step, once'

SLOW = '''
class Slow(MultiGrain):
    def features(self, images):
        time.sleep(.2)
        return super().features(images)
Index.build(sys.argv[1], Slow('mini', n_classes=4), sys.argv[2], save_seconds=0, **HOW)
'''

def test_killed_while_embedding_and_resumed(tmp_path):
    photos = draw(tmp_path/'photos', range(30))
    child = start(tmp_path, SLOW, photos, tmp_path/'index')
    try:
        for _ in range(3000): # a busy machine starts slowly
            time.sleep(.05)
            assert child.poll() is None, child.communicate()[1]
            marks = list((tmp_path/'index').glob('.work-*/done.npy'))
            if marks and np.load(marks[0]).sum() >= 6: break
        with pytest.raises(RuntimeError, match='is being written by another process'):
            Index.build(photos, model(), tmp_path/'index', **HOW)
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill(); child.communicate()
    safe = np.flatnonzero(np.load(marks[0]))
    assert 6 <= len(safe) < 30
    with pytest.raises(ValueError, match='holds no index'): Index.open(tmp_path/'index')
    stored = np.load(marks[0].parent/'embeddings.npy', mmap_mode='r+')
    stored[0, safe[0]] = 0  # a mark, to see that what is safe is not computed again
    stored[0, safe[0], 0] = 1
    stored.flush()
    resumed = Index.build(photos, model(), tmp_path/'index', **HOW)
    assert len(resumed) == 30 and resumed.near.embeddings[safe[0], 0] == 1
    assert not list((tmp_path/'index').glob('.work-*'))

def test_grown_equals_built_at_once(tmp_path):
    "Add, remove, change, delete and update; then the same folder from scratch."
    photos, unrelated = draw(tmp_path/'photos', range(20)), draw(tmp_path/'unrelated', range(100, 139))
    grown = Index.build(photos, model(), tmp_path/'grown', distractors=unrelated, fpr=.05, **HOW)
    draw(photos, range(30, 40)); grown.add([photos/'030.png', photos/'031.png'], progress=False)
    grown.remove([photos/'004.png', photos/'030.png']); (photos/'004.png').unlink()
    draw(photos, range(5, 8), shift=500); (photos/'009.png').unlink(); draw(photos/'below', range(50, 53))
    grown.update(progress=False)
    fresh = Index.build(photos, model(), tmp_path/'fresh', distractors=unrelated, fpr=.05, **HOW)
    same(state(grown), state(fresh))
    assert len(grown) == 20 - 2 + 10 + 3
    assert grown.calibration.threshold == pytest.approx(fresh.calibration.threshold, abs=1e-5)
    for grain in ('class', 'instance', 'copy'):
        for i in (2, 6, 33):
            a, b = (o.query(photos/f'{i:03}.png', grain, 5) for o in (grown, fresh))
            assert [h.path for h in a] == [h.path for h in b]
            assert np.allclose([h.similarity for h in a], [h.similarity for h in b], atol=1e-5)
    generation = grown.manifest.generation
    assert grown.update(progress=False).manifest.generation == generation

SHARED = '''
import torch.distributed as dist
root = Path(sys.argv[1])
def embedded(self, *_): seen.append(_[0]); return features(self, *_)
seen, features = [], MultiGrain.features
MultiGrain.features = embedded
index = Index.build(root/'photos', model(), root/'shared', distractors=root/'unrelated', fpr=.05, **HOW)
draw(root/'photos', [90]) if dist.get_rank() == 0 else None
dist.barrier()
index.add([root/'photos'/'090.png'], batch_size=2, progress=False)
assert len(index) == 14 and len(index.query(root/'photos'/'090.png')) == 10
try: index.remove('nowhere.png')
except ValueError: pass
else: raise AssertionError('not refused')
open(root/f'seen{dist.get_rank()}', 'w').write(str(sum(map(len, seen))))
'''

def test_torchrun_shares_the_embedding(tmp_path):
    "Two processes embed the images of one index, which then has the bytes of one made by one process."
    photos, _ = draw(tmp_path/'photos', range(13)), draw(tmp_path/'unrelated', range(100, 130))
    child = start(tmp_path, SHARED, tmp_path, processes=2)
    errors = child.communicate(timeout=400)[1]
    assert child.returncode == 0, errors[-3000:]
    (new := photos/'090.png').rename(tmp_path/'090.png')
    alone = Index.build(photos, model(), tmp_path/'alone', distractors=tmp_path/'unrelated', fpr=.05, **HOW)
    (tmp_path/'090.png').rename(new)
    alone.add([new], batch_size=2, progress=False)
    seen = [int((tmp_path/f'seen{o}').read_text()) for o in (0, 1)]
    assert sum(seen) >= 13 + 30 + 1 and min(seen) > 15 # both worked
    a, b = ({o.name: o.read_bytes() for o in (tmp_path/p/'generation-000002').iterdir()} for p in ('alone', 'shared'))
    assert {*a} >= {'embeddings.npy', 'rows.npy', 'thumbnails.bin', 'distractors.npy'} and a.keys() == b.keys()
    for name in a: assert a[name] == b[name], name

def test_two_objects_of_one_index(tmp_path):
    "One that was opened before the other wrote builds on what is there, and still answers from what it has."
    photos = draw(tmp_path/'photos', range(6))
    a = Index.build(photos, model(), tmp_path/'index', **HOW)
    b = Index.open(tmp_path/'index')
    a.add(draw(tmp_path/'more', [10, 11]), progress=False)
    assert len(b) == 6 and len(b.query(photos/'000.png')) == 6 # its files are gone, but open
    assert b.thumbnail(3).size == (16, 14)
    b.add(draw(tmp_path/'third', [20]), progress=False)
    assert len(b) == len(Index.open(tmp_path/'index')) == 9

def hostile(folder):
    "Files that are not what their names say."
    draw(folder, range(3))
    good = (folder/'000.png').read_bytes()
    (folder/'empty.jpg').touch()
    (folder/'text.png').write_text('hello')
    (folder/'cut.png').write_bytes(good[:-200])
    (folder/'dangling.jpg').symlink_to(folder/'nowhere')
    Image.new('RGB', (1, 400)).save(folder/'thin.png')
    (folder/'folder.jpg').mkdir()
    os.mkfifo(folder/'pipe.jpg')
    (folder/'bomb.png').write_bytes(good[:16] + (60000).to_bytes(4, 'big')*2 + good[24:])
    (Path(os.fsdecode(os.fsencode(folder) + b'/odd\xff\nname.png'))).write_bytes(good)
    return folder

def test_hostile_files(tmp_path):
    index = Index.build(hostile(tmp_path/'photos'), model(), tmp_path/'index', **HOW)
    bad = {'empty.jpg', 'text.png', 'cut.png', 'dangling.jpg', 'thin.png', 'pipe.jpg', 'bomb.png'}
    assert len(index) == 4 and {Path(o).name for o in index.skipped} == bad
    assert all('\n' not in o and len(o) > 8 for o in index.skipped.values())
    odd = [o.path for o in Index.open(tmp_path/'index').query(tmp_path/'photos'/'000.png', k=2)]
    assert {Path(o).name for o in odd} == {'000.png', os.fsdecode(b'odd\xff\nname.png')}
    index.update(progress=False)
    assert len(index) == 4
    for name in index.skipped:
        with pytest.raises(ValueError): index.query(name)

@pytest.mark.parametrize('name', ['empty.jpg', 'cut.png', 'thin.png'])
def test_nothing_usable(tmp_path, name):
    photos = hostile(tmp_path/'photos')
    with pytest.raises(ValueError, match=f'not one of 1 can be used, the first: .*{name}'):
        Index.build(photos/name, model(), tmp_path/'index', **HOW)
    with pytest.raises(ValueError, match='holds no index'): Index.open(tmp_path/'index')
    index = Index.build(photos/'001.png', model(), tmp_path/'index', **HOW)  # the folder can still be used
    assert len(index) == 1 and len(index.query(photos/'000.png', k=10)) == 1
    assert len(index.add(photos/name, progress=False)) == 1 and [Path(o).name for o in index.skipped] == [name]

@pytest.mark.parametrize('damage', ['cut', 'swap', 'gone', 'pickle'])
@pytest.mark.parametrize('file', ['manifest.json', 'embeddings.npy', 'rows.npy', 'paths.json', 'thumbnails.bin'])
def test_damaged_index(whole, tmp_path, file, damage):
    "One sentence, and no code of the file is executed."
    folder = Path(shutil.copytree(whole, tmp_path/'index'))
    path = next(folder.rglob(file))
    data = path.read_bytes()
    code = b'cposix\nsystem\n(S"touch ' + str(tmp_path/'executed').encode() + b'"\ntR.'
    damaged = dict(cut=data[:len(data)//2], swap=b'\x93NUMPY\x01\x00garbage' + data[15:-1], pickle=code)
    if damage == 'gone': path.unlink()
    else: path.write_bytes(damaged[damage])
    with pytest.raises(ValueError) as e: Index.open(folder)
    assert '\n' not in str(e.value) and str(folder) in str(e.value) and not (tmp_path/'executed').exists()

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    tmp = tmp_path_factory.mktemp('whole')
    return Index.build(draw(tmp/'photos', range(4)), model(), tmp/'index', **HOW).folder

def test_disk_full_leaves_the_index_as_it_was(tmp_path, monkeypatch):
    index = Index.build(draw(tmp_path/'photos', range(4)), model(), tmp_path/'index', **HOW)
    before, real = state(index), os.fsync
    def full(handle):
        if 'rows.npy' in os.readlink(f'/proc/self/fd/{handle}'): raise OSError(28, 'No space left on device')
        real(handle)
    monkeypatch.setattr(os, 'fsync', full)
    with pytest.raises(OSError, match='No space left on device.*as it was before'):
        index.add(draw(tmp_path/'more', [10]), progress=False)
    monkeypatch.undo()
    same(state(Index.open(tmp_path/'index')), before)
    assert len([o for o in (tmp_path/'index').iterdir() if o.name.startswith('generation')]) == 1
    assert len(index.add(tmp_path/'more', progress=False)) == 5

def test_another_model_or_resolution_is_refused(whole):
    photos = whole.parent/'photos'
    def build(net, **how): return lambda: Index.build(photos, net, whole, **how)
    other, wider = MultiGrain('mini', n_classes=4, seed=1), MultiGrain('mini', n_classes=5)
    for refused, words in ((lambda: Index.open(whole, other), 'belongs to another model'),
                           (lambda: Index.open(whole, s=64), 'was built with s=32, not s=64'),
                           (build(model(), s=48), 'was built with s=32, not s=48'),
                           (build(model(), s=32, p=1.5), 'was built with p=3.0, not p=1.5'),
                           (build(wider, s=32), 'belongs to another model')):
        with pytest.raises(ValueError, match=words): refused()
    assert len(Index.open(whole, model(), s=32, p=3)) == 4
