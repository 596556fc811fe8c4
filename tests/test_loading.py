"Loaders on real files and real processes: the same bytes everywhere, hostile files, workers that die."
import hashlib, os, random, struct, subprocess, sys, zlib
from pathlib import Path

import numpy as np, pytest, torch
from PIL import Image
from multigrain.image import BadImage
from multigrain.loading import test_loader as rectangles, train_loader  # pytest would take the name for a test
from multigrain.readers import image_folder
from multigrain.sets import ImageSet
from multigrain.transforms import test_transform as transform_for

ROOT = Path(__file__).resolve().parent.parent

def picture(h, w, seed):
    "Smooth noise, so that JPEG has something to do."
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((w, h), Image.Resampling.BICUBIC)

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Twelve pictures in three sizes, two classes."
    root = tmp_path_factory.mktemp('photos')
    for i in range(12):
        (root/'ab'[i//6]).mkdir(exist_ok=True)
        picture(*[(60, 80), (80, 60), (75, 100)][i % 3], i).save(root/'ab'[i//6]/f'{i:02}.jpg', quality=95)
    return root

@pytest.fixture
def photos(folder): return image_folder(folder, cache=False)

def digest(batch): return hashlib.sha256(b''.join(o.numpy().tobytes() for o in batch[:4])).hexdigest()
def digests(batches): return [digest(b) for b in batches]

def same(a, b): return digests(a) == digests(b)

EPOCH = '''
import hashlib, sys
from multigrain.readers import image_folder
from multigrain.loading import train_loader
if __name__ == '__main__':
    root, method, (workers, start, cache) = sys.argv[1], sys.argv[5], map(int, sys.argv[2:5])
    loader = train_loader(image_folder(root, cache=False), s=224, batch_size=6, m=3, iterations=6, seed=5,
                          workers=workers, cache=bool(cache))
    if workers and method: loader.batches.multiprocessing_context = method
    loader.set_epoch(3, start)
    for b in loader: print(hashlib.sha256(b''.join(o.numpy().tobytes() for o in b[:4])).hexdigest(), flush=True)
'''

@pytest.mark.parametrize('threads, workers, start, cache, method', [(2, 0, 0, 0, ''), (1, 1, 2, 1, 'spawn')])
def test_another_process_gives_the_same_bytes(folder, photos, tmp_path, threads, workers, start, cache, method):
    "With another number of threads, workers and another start."
    (script := tmp_path/'epoch.py').write_text(EPOCH)
    env = os.environ | dict(OMP_NUM_THREADS=str(threads), PYTHONPATH=str(ROOT))
    words = sys.executable, script, *map(str, (folder, workers, start, cache, method))
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    loader = train_loader(photos, s=224, batch_size=6, m=3, iterations=6, seed=5)
    loader.set_epoch(3)
    assert done.stdout.split() == digests(loader)[start:]

def test_global_generators_and_threads_are_left_alone(photos):
    def state():
        generators = torch.random.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
        return torch.get_num_threads(), *generators
    before = state()
    for workers in (0, 1):
        assert len(list(train_loader(photos, s=16, batch_size=6, workers=workers, cache=True)))
        assert len(list(rectangles(photos, 40, False, workers=workers)))
    assert state() == before

def test_epochs_follow_one_another_in_the_same_workers(photos):
    a, b = (train_loader(photos, 'AA', s=20, batch_size=6, m=2, iterations=3, seed=1, workers=n) for n in (0, 2))
    for epoch in (0, 1, 0, 7):
        a.set_epoch(epoch); b.set_epoch(epoch)
        assert same(list(a), list(b))
    pids = [w.pid for w in b.batches._iterator._workers]
    b.set_epoch(1, start=2); list(b)
    assert pids == [w.pid for w in b.batches._iterator._workers]  # started once

def claims(h, w):
    "A PNG of a few bytes that claims any size."
    ihdr = b'IHDR' + struct.pack('>IIBBBBB', w, h, 8, 2, 0, 0, 0)
    return b'\x89PNG\r\n\x1a\n' + struct.pack('>I', 13) + ihdr + struct.pack('>I', zlib.crc32(ihdr))

@pytest.fixture
def hostile(folder, tmp_path):
    "A set, made without an index, in which every second file is broken; and the paths of those."
    good = sorted(map(str, folder.rglob('*.jpg')))
    whole = Path(good[0]).read_bytes()
    broken = {'cut.jpg': whole[:len(whole)//2], 'empty.jpg': b'', 'text.jpg': b'not a photograph',
              'bomb.png': claims(50_000, 50_000)}
    for name, content in broken.items(): (tmp_path/name).write_bytes(content)
    picture(1, 1, 0).save(tmp_path/'dot.png'); picture(1, 5000, 0).save(tmp_path/'thread.png')
    bad = [str(tmp_path/o) for o in (*broken, 'dot.png', 'thread.png', 'gone.jpg')]
    return ImageSet('hostile', [p for pair in zip(good, bad) for p in pair]), bad

@pytest.mark.parametrize('workers', [0, 2])
def test_hostile_files_are_skipped_with_their_views_and_listed(hostile, workers):
    images, bad = hostile
    loader = train_loader(images, s=16, batch_size=12, m=2, iterations=7, workers=workers, bad='skip')
    seen = set()
    for batch in loader:
        assert len(batch.image) == 12 - 2*len(batch.skipped)  # smaller, and it says so
        assert batch.instance.unique(return_counts=True)[1].tolist() == [2]*(len(batch.image)//2)
        seen |= set(batch.instance.tolist())
    assert seen == set(range(0, 14, 2)) and set(loader.skipped) == set(bad) and loader.kept.tolist() == sorted(seen)
    squares = rectangles(images, 32, True, batch_size=3, workers=workers, bad='skip')
    assert sorted(torch.cat([b.instance for b in squares]).tolist()) == sorted(seen)
    assert squares.skipped == loader.skipped
    assert all('\n' not in reason for reason in loader.skipped.values())

def sentence(loader):
    "What a loader says when it stops (pytest.raises would keep it and its workers alive)."
    try: list(loader)
    except BadImage as e: return str(e)
    return ''

@pytest.mark.parametrize('workers', [0, 2])
def test_one_bad_file_stops_with_one_sentence(hostile, workers):
    images, bad = hostile
    for path in bad:
        one = ImageSet('one', [images.paths[0], images.paths[2], path])
        train = train_loader(one, s=16, batch_size=3, m=1, workers=workers)
        for loader in (train, rectangles(one, 32, workers=workers)):
            said = sentence(loader)
            assert said.startswith(path) and '\n' not in said and "bad='skip'" in said
        if workers: break  # the sentence is made in this process either way

def test_only_the_first_frame_of_an_animation_is_used(tmp_path):
    frames = [picture(40, 30, s) for s in (0, 1)]
    frames[0].save(tmp_path/'moving.gif', save_all=True, append_images=frames[1:])
    with pytest.warns(UserWarning, match='first frame'): images = image_folder(tmp_path, cache=False)
    batch, = rectangles(images, 32, False)
    with Image.open(tmp_path/'moving.gif') as im:
        assert torch.equal(batch.image[0], transform_for(32, False)(im.convert('RGB')))

def test_a_file_that_changes_after_it_was_indexed_is_never_made_to_fit(tmp_path):
    for i in range(4): picture(60, 80, i).save(tmp_path/f'{i}.jpg')
    images = image_folder(tmp_path, cache=False)
    picture(80, 60, 9).save(tmp_path/'1.jpg'); (tmp_path/'2.jpg').unlink()
    loader = rectangles(images, 40, False, bad='skip', workers=2)
    assert [b.instance.tolist() for b in loader] == [[0, 3]]
    assert 'index the set again' in loader.skipped[images.paths[1]]
    assert 'cannot be opened' in loader.skipped[images.paths[2]]
    with pytest.raises(BadImage, match='index the set again'):
        train_loader(images, s=16, batch_size=4, m=1, cache=True)

def test_sets_that_are_pixels_need_no_files():
    pixels = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)
    images = ImageSet('pixels', [str(i) for i in range(10)], pixels=pixels, sizes=np.full((10, 2), 32),
                      labels=np.arange(10) % 2, classes=['a', 'b'])
    how = dict(s=24, batch_size=6, iterations=3)
    a, b = (list(train_loader(images, workers=n, cache=c, **how)) for n, c in ((0, False), (2, True)))
    assert same(a, b)
    batch, = rectangles(images, 32, False)
    assert torch.equal(batch.image, torch.tensor(pixels).permute(0, 3, 1, 2))

def test_ten_thousand_shapes_are_batched_without_opening_a_file():
    sizes = np.random.default_rng(0).integers(50, 4000, (10_000, 2))
    images = ImageSet('shapes', [f'{i}.jpg' for i in range(10_000)], sizes=sizes)
    loader = rectangles(images, 500, False, batch_size=16, max_pixels=1_000_000)
    steps = [[row for row, _ in keys] for _, keys in loader.steps]
    assert sorted(row for rows in steps for row in rows) == list(range(10_000))
    for rows in steps:
        shapes = {(max(1, h*500//max(h, w)), max(1, w*500//max(h, w))) for h, w in sizes[rows].tolist()}
        (h, w), = shapes
        assert len(rows) <= 16 and (len(rows) == 1 or len(rows)*h*w <= 1_000_000)

DIES = '''
import os, signal, sys
from multigrain.readers import image_folder
from multigrain.loading import train_loader
images = image_folder(sys.argv[1], cache=False)
loader = train_loader(images, s=64, batch_size=6, m=3, iterations=500, workers=1)
try:
    for step, _ in enumerate(loader):
        if step == 1: os.kill(loader.batches._iterator._workers[0].pid, signal.SIGKILL)
except RuntimeError as e: print(e, flush=True); os._exit(1)
'''

def test_a_worker_that_dies_is_an_error_and_not_a_hang(folder):
    env = os.environ | dict(PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, '-c', DIES, folder], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 1, done.stderr
    # PyTorch's own sentence, if the news of its death comes while this process is at something else
    said = done.stdout + done.stderr
    assert 'one of those that load photos' in said or 'DataLoader worker' in said, said
