"Embedding in real processes: killed and resumed, two at once, one folder for one writer."
import json, os, shutil, signal, subprocess, sys, time
from pathlib import Path

import numpy as np, pytest
from PIL import Image
from multigrain.embed import embed, read_embeddings
from multigrain.model import MultiGrain
from multigrain.readers import image_folder, in_aug
from multigrain.sets import ImageSet

ROOT = Path(__file__).resolve().parent.parent
HOW = dict(s=72, square=False, ps=[1, 3], logits=True, batch_size=2)

def model(): return MultiGrain('mini', n_classes=4)

def photos(root): return image_folder(root, cache=False)

def copies(images):
    labels = np.arange(len(images)) % 4
    return in_aug(ImageSet('photos', images.paths, labels=labels, classes=list('abcd'), sizes=images.sizes), copies=3)

def intact(images): return images.take([i for i in range(30) if i != 7])

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Thirty synthetic pictures in three sizes; the data of number 7 are cut off."
    root = tmp_path_factory.mktemp('photos')
    for i in range(30):
        noise = np.random.default_rng(i).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        size = [(80, 60), (60, 80), (90, 60)][i % 3]
        Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(root/f'{i:02}.png')
    cut = root/'07.png'
    cut.write_bytes(cut.read_bytes()[:-200])
    return root

@pytest.fixture(scope='module')
def whole(folder): return embed(model(), photos(folder), bad='skip', **HOW)

def same(a, b):
    assert a.ps == b.ps and a.rows.tolist() == b.rows.tolist() and list(a.skipped) == list(b.skipped)
    for p in a.ps:
        assert np.allclose(a[p].embedding, b[p].embedding, atol=1e-5)
        assert np.allclose(a[p].logits, b[p].logits, atol=1e-5)

def start(tmp_path, body, *arguments, processes=1):
    "A script in processes of its own."
    head = f'import sys, time\nsys.path.insert(0, {str(ROOT/"tests")!r})\nfrom test_embed import *\n'
    (script := tmp_path/'script.py').write_text(head + body)
    several = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
    command = [sys.executable, *several*(processes > 1), str(script), *map(str, arguments)]
    env = {k: v for k, v in os.environ.items() if k not in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')}
    env |= dict(OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

SLOW = '''
class Slow(MultiGrain):
    def features(self, images):
        time.sleep(.2)
        return super().features(images)
slow = Slow('mini', n_classes=4)
embed(slow, photos(sys.argv[1]), folder=sys.argv[2], bad='skip', save_seconds=0, **HOW)
'''

@pytest.fixture(scope='module')
def killed(folder, tmp_path_factory):
    "A folder whose writer was killed when some rows were safe."
    tmp = tmp_path_factory.mktemp('killed')
    child = start(tmp, SLOW, folder, tmp/'out')
    try:
        for _ in range(3000): # a busy machine starts slowly
            time.sleep(.05)
            assert child.poll() is None, child.communicate()[1]
            if (tmp/'out'/'done.npy').exists() and np.load(tmp/'out'/'done.npy').sum() >= 6: break
        with pytest.raises(RuntimeError, match='is being written by another process'):
            embed(model(), photos(folder), folder=tmp/'out', bad='skip', **HOW)
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill(); child.communicate()
    return tmp/'out'

def test_killed_and_resumed(folder, killed, whole, tmp_path):
    out = Path(shutil.copytree(killed, tmp_path/'out'))
    safe = np.flatnonzero(np.load(out/'done.npy'))
    assert 6 <= len(safe) < 29 and not json.loads((out/'manifest.json').read_text())['complete']
    with pytest.raises(ValueError, match='is not complete'): read_embeddings(out)
    stored = np.load(out/'embeddings.npy', mmap_mode='r+')
    assert np.allclose(stored[1, safe], whole[3].embedding[np.searchsorted(whole.rows, safe)], atol=1e-5)
    stored[1, safe[0], 0] += 1; stored.flush()  # a mark, to see that what is safe is not computed again
    resumed = embed(model(), photos(folder), folder=out, bad='skip', **HOW)
    assert stored[1, safe[0], 0] - whole[3].embedding[np.searchsorted(whole.rows, safe[0]), 0] > .9
    stored[1, safe[0], 0] -= 1; stored.flush()
    same(resumed, whole); same(read_embeddings(out), whole)

PAIR = '''
import torch.distributed as dist
root, out, free = sys.argv[1:]
results = dict(resumed=embed(model(), photos(root), folder=out, bad='skip', **HOW),
               memory=embed(model(), photos(root), bad='skip', **HOW),
               copies=embed(model(), copies(intact(photos(root))), 64))
assert dist.get_world_size() == 2
try: embed(model(), photos(root), 80, folder=out, bad='skip')
except ValueError as e: assert 'other resolution s' in str(e)
else: raise AssertionError('not refused')
for k, r in results.items():
    e = np.stack([r[p].embedding for p in r.ps])
    np.savez(f'{free}/{k}{dist.get_rank()}.npz', embedding=e, rows=r.rows, skipped=list(r.skipped))
'''

def test_two_processes_finish_what_one_began(folder, killed, whole, tmp_path):
    out = Path(shutil.copytree(killed, tmp_path/'out'))
    child = start(tmp_path, PAIR, folder, out, tmp_path, processes=2)
    errors = child.communicate(timeout=400)[1]
    assert child.returncode == 0, errors[-3000:]
    same(read_embeddings(out), whole)
    alone = embed(model(), copies(intact(photos(folder))), 64)
    for rank in (0, 1):
        for k in ('resumed', 'memory'):
            got = np.load(tmp_path/f'{k}{rank}.npz')
            assert got['rows'].tolist() == whole.rows.tolist()
            assert [Path(o).name for o in got['skipped']] == ['07.png']
            assert np.allclose(got['embedding'], np.stack([whole[p].embedding for p in whole.ps]), atol=1e-5)
        assert np.allclose(np.load(tmp_path/f'copies{rank}.npz')['embedding'][0], alone.embedding, atol=1e-5)

def test_manifest_does_not_change(folder, tmp_path):
    "The file by value: folders of older versions must be found again."
    embed(model(), photos(folder), s=72, square=False, ps=[3, float('inf')], folder=tmp_path, bad='skip')
    found = json.loads((tmp_path/'manifest.json').read_text())
    assert list(found) == ['format', 'complete', 'record', 'skipped'] and found['format'] == 1
    assert ' '.join(found['record']) == ('model weights whitening s square views resize ps precision dtype dim logits '
                                         'images n fingerprint rotations')
    wanted = dict(model='mini', whitening=None, s=72, square=False, views='test', resize='PIL', ps=[3.0, 'inf'], n=30,
                  precision='float32', dtype='float32', dim=128, logits=0, images=folder.name, rotations=False)
    assert {k: v for k, v in found['record'].items() if k in wanted} == wanted
