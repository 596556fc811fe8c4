"The embedded world: written by several processes, killed in the middle, asked for twice, read by the real readers."
import hashlib, json, os, signal, stat, subprocess, sys, time, warnings
from pathlib import Path
import pytest
from PIL import Image
from multigrain.world import KINDS, make_world

SMALL = dict(n_classes=3, n_train=4, n_val=2, n_holidays=4, n_ukbench=3, n_copydays=3, n_distractors=5, n_whiten=4)
CALL = 'from multigrain.world import make_world; make_world({root!r}, processes={processes}, **{sizes!r})'

def images(root): return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(root).rglob('*')) if p.suffix in ('.jpg', '.JPEG')}
def manifest(root): return json.loads((root/'world.json').read_text())
def start(root, sizes=SMALL, processes=2, **how):
    return subprocess.Popen([sys.executable, '-c', CALL.format(root=str(root), processes=processes, sizes=sizes)], stderr=subprocess.PIPE, text=True, **how)

@pytest.fixture(scope='module')
def world(tmp_path_factory): return make_world(tmp_path_factory.mktemp('one')/'world', processes=1, progress=False, **SMALL)


def test_layout(world):
    names = images(world)
    folders = {'train': 12, 'val': 6, 'holidays/jpg': 2+3+4+2, 'ukbench': 12, 'copydays/original': 3, 'copydays/strong': 1+2+1, 'copydays/crops': 27, 'copydays/jpeg': 27, 'distractors': 5, 'whiten': 4}
    assert {f: sum(n.startswith(f + '/') for n in names) for f in folders} == folders and len(names) == sum(folders.values())
    assert sorted(p.name for p in (world/'train').iterdir()) == sorted(p.name for p in (world/'val').iterdir()) == list(KINDS)[:3]
    assert sorted(p.name for p in (world/'holidays/jpg').iterdir())[:5] == ['100000.jpg', '100001.jpg', '100100.jpg', '100101.jpg', '100102.jpg']
    assert sorted(p.name for p in (world/'ukbench').iterdir()) == [f'ukbench{i:05d}.jpg' for i in range(12)]
    assert sorted(p.name for p in (world/'copydays/strong').iterdir()) == ['200001.jpg', '200101.jpg', '200102.jpg', '200201.jpg']
    assert sorted(int(p.name) for p in (world/'copydays/crops').iterdir()) == [10, 15, 20, 30, 40, 50, 60, 70, 80]
    assert sorted(int(p.name) for p in (world/'copydays/jpeg').iterdir()) == [3, 5, 8, 10, 15, 20, 30, 50, 75]
    assert manifest(world)['complete'] and 'SYNTHETIC' in (world/'README.md').read_text()
    assert len(set(names.values())) == len(names), 'two files are the same image'
    for name in names:
        with Image.open(world/name) as im:
            assert (im.format, im.mode) == ('JPEG', 'RGB') and b'Synthetic' in im.info['comment']
            im.load()

def test_same_bytes_from_two_processes(world, tmp_path):
    assert images(make_world(tmp_path/'two', processes=2, progress=False, **SMALL)) == images(world)

def test_an_image_does_not_depend_on_the_size_of_the_world(world, tmp_path):
    larger = images(make_world(tmp_path/'larger', processes=2, progress=False, **{k: v + 1 for k, v in SMALL.items()}))
    assert images(world).items() <= larger.items()

def test_another_seed_is_another_world(world, tmp_path):
    other = images(make_world(tmp_path/'other', seed=1, processes=2, progress=False, **SMALL))
    assert other.keys() == images(world).keys() and not set(other.values()) & set(images(world).values())

@pytest.mark.parametrize('change', [dict(seed=1), dict(n_whiten=5), dict(n_classes=2)])
def test_another_world_in_the_same_folder_is_refused(world, change):
    before, (name, value), = images(world), *change.items()
    with pytest.raises(ValueError, match=rf'{name}=\d+ \(not {value}\)'): make_world(world, progress=False, **{**SMALL, **change})
    assert images(world) == before

def test_refused_folders(tmp_path):
    (tmp_path/'photo.jpg').write_bytes(b'mine')
    with pytest.raises(ValueError, match='holds other files'): make_world(tmp_path, **SMALL)
    with pytest.raises(ValueError, match='is a file'): make_world(tmp_path/'photo.jpg', **SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ['photo.jpg']

def test_second_call_returns_at_once(world):
    before = {p: p.stat().st_mtime_ns for p in world.rglob('*')}
    began = time.perf_counter()
    make_world(world, **SMALL)
    assert time.perf_counter() - began < 1 and before == {p: p.stat().st_mtime_ns for p in world.rglob('*')}

def test_complete_world_on_a_read_only_disk(world):
    folders = [world, *[p for p in world.rglob('*') if p.is_dir()]]
    for p in folders: p.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try: assert make_world(world, **SMALL) == world
    finally:
        for p in folders: p.chmod(stat.S_IRWXU)

@pytest.mark.parametrize('after', [1, 40])
def test_killed_and_continued(world, tmp_path, after):
    "SIGKILL once some files are there: no worker stays, the manifest says incomplete, the next call gives the same files."
    root, sizes = tmp_path/'world', dict(SMALL, n_train=40)
    run = start(root, sizes, start_new_session=True)
    limit = time.monotonic() + 60
    while len(images(root)) < after and time.monotonic() < limit: time.sleep(.01)
    os.kill(run.pid, signal.SIGKILL); run.wait()
    members = lambda: [p for p in Path('/proc').glob('[0-9]*/stat') if (p.exists() and _session(p) == run.pid)]
    while members() and time.monotonic() < limit: time.sleep(.05)
    assert not members(), 'a worker outlived its caller'
    kept = images(root)
    assert len(kept) >= after and not manifest(root)['complete']
    make_world(root, processes=2, progress=False, **sizes)
    whole = images(root)
    assert kept.items() <= whole.items() and images(world).items() <= whole.items()
    assert manifest(root)['complete'] and not list(root.rglob('*.part'))

def _session(stat_file):
    try: return int(stat_file.read_text().rpartition(')')[2].split()[3])
    except (OSError, IndexError): return None # ended meanwhile

def test_callers_at_once(world, tmp_path):
    "Some calls for one new folder, with the time between looking and writing stretched: one draws, the others wait for it."
    slow = """import random, time, multigrain.world as w
def late(f):
    def g(*a): x = f(*a); time.sleep(random.uniform(0, .1)); return x
    return g
w.put, w.read_manifest = late(w.put), late(w.read_manifest)
time.sleep(random.uniform(0, .3))
"""
    for i in range(3):
        runs = [subprocess.Popen([sys.executable, '-c', slow + CALL.format(root=str(tmp_path/f'world{i}'), processes=2, sizes=SMALL)], stderr=subprocess.PIPE, text=True) for _ in range(3)]
        for run in runs: _, err = run.communicate(timeout=120); assert run.returncode == 0, err
        assert images(tmp_path/f'world{i}') == images(world)

def test_manifest_is_the_first_and_the_last_file(tmp_path, monkeypatch):
    "First, so that no other caller takes a new world for a stranger's folder; last, so that the mark of completion is true."
    import multigrain.world as w
    written, put = [], w.put
    monkeypatch.setattr(w, 'put', lambda path, data: (written.append(path.name), put(path, data)))
    make_world(tmp_path/'world', processes=1, progress=False, **SMALL)
    assert written[0] == written[-1] == 'world.json' and written.count('world.json') == 2 and len(written) > 100

def test_unguarded_script_is_told_so(tmp_path):
    "A script without `if __name__ == '__main__':` ends with a sentence; it must not hang."
    (tmp_path/'script.py').write_text(CALL.format(root=str(tmp_path/'world'), processes=2, sizes=SMALL))
    done = subprocess.run([sys.executable, tmp_path/'script.py'], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "if __name__ == '__main__'" in done.stderr.strip().splitlines()[-1]

def test_read_by_the_readers(world, monkeypatch, tmp_path):
    data = pytest.importorskip('multigrain.data')
    monkeypatch.setenv('MULTIGRAIN_CACHE', str(tmp_path))
    sets = [(data.imagenet, world, 'train', 12), (data.imagenet, world, 'val', 6), (data.holidays, world/'holidays', None, 11), (data.ukbench, world/'ukbench', None, 12)]
    sets += [(data.copydays, world/'copydays', part, n) for part, n in (('strong', 3 + 4), ('crops/50', 3 + 3), ('jpeg/3', 3 + 3))] + [(data.distractors, world/'distractors', None, 5)]
    for read, root, part, n in sets:
        how = {} if read is data.distractors else dict(incomplete=True) # fewer images than the real sets have
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            assert len(read(root, *([part] if part else []), **how)) == n, (read.__name__, part)
