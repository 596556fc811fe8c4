"The embedded world: written by several processes, killed in the middle, asked for twice, read by the real readers."
import hashlib, json, os, signal, stat, subprocess, sys, time, warnings
from pathlib import Path
import pytest
from PIL import Image
import multigrain.world as module
from multigrain.readers import copydays, distractors, holidays, imagenet, ukbench
from multigrain.world import OBJECTS, make_world

SMALL = dict(n_classes=3, n_train=4, n_val=2, n_holidays=4, n_ukbench=3, n_copydays=3, n_distractors=5, n_whiten=4)
CALL = 'from multigrain.world import make_world; make_world({root!r}, processes={processes}, **{sizes!r})'

def images(root):
    "Name -> hash of the content, of all images."
    found = [p for p in sorted(Path(root).rglob('*')) if p.suffix in ('.jpg', '.JPEG')]
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}
def names(folder): return sorted(p.name for p in folder.iterdir())
def manifest(root): return json.loads((root/'world.json').read_text())
def start(root, sizes=SMALL, before='', **how):
    "Call make_world in another process."
    code = before + CALL.format(root=str(root), processes=2, sizes=sizes)
    return subprocess.Popen([sys.executable, '-c', code], stderr=subprocess.PIPE, text=True, **how)

@pytest.fixture(scope='module')
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp('one')/'world', processes=1, progress=False, **SMALL)

def test_layout(world):
    found = images(world)
    folders = {'train': 12, 'val': 6, 'holidays/jpg': 2+3+4+2, 'ukbench': 12, 'copydays/original': 3,
               'copydays/strong': 1+2+1, 'copydays/crops': 27, 'copydays/jpeg': 27, 'distractors': 5, 'whiten': 4}
    assert {f: sum(n.startswith(f + '/') for n in found) for f in folders} == folders
    assert len(found) == sum(folders.values())
    assert names(world/'train') == names(world/'val') == list(OBJECTS)[:3]
    assert names(world/'holidays/jpg')[:5] == [f'{n}.jpg' for n in (100000, 100001, 100100, 100101, 100102)]
    assert names(world/'ukbench') == [f'ukbench{i:05d}.jpg' for i in range(12)]
    assert names(world/'copydays/strong') == [f'{n}.jpg' for n in (200001, 200101, 200102, 200201)]
    assert sorted(map(int, names(world/'copydays/crops'))) == [10, 15, 20, 30, 40, 50, 60, 70, 80]
    assert sorted(map(int, names(world/'copydays/jpeg'))) == [3, 5, 8, 10, 15, 20, 30, 50, 75]
    assert manifest(world)['complete'] and 'SYNTHETIC' in (world/'README.md').read_text()
    assert len(set(found.values())) == len(found), 'two files are the same image'
    for name in found:
        with Image.open(world/name) as im:
            assert (im.format, im.mode) == ('JPEG', 'RGB') and b'Synthetic' in im.info['comment']
            im.load()

def test_same_bytes_from_two_processes(world, tmp_path):
    assert images(make_world(tmp_path/'two', processes=2, progress=False, **SMALL)) == images(world)

def test_an_image_does_not_depend_on_the_size_of_the_world(world, tmp_path):
    sizes = {k: v + 1 for k, v in SMALL.items()}
    larger = images(make_world(tmp_path/'larger', processes=2, progress=False, **sizes))
    assert images(world).items() <= larger.items()

def test_another_seed_is_another_world(world, tmp_path):
    other = images(make_world(tmp_path/'other', seed=1, processes=2, progress=False, **SMALL))
    assert other.keys() == images(world).keys() and not set(other.values()) & set(images(world).values())

@pytest.mark.parametrize('change', [dict(seed=1), dict(n_whiten=5), dict(n_classes=2)])
def test_another_world_in_the_same_folder_is_refused(world, change):
    before, (name, value), = images(world), *change.items()
    with pytest.raises(ValueError, match=rf'{name}=\d+ \(not {value}\)'):
        make_world(world, progress=False, **{**SMALL, **change})
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
    "SIGKILL once some files are there: no worker stays, the manifest says so, the next call gives the same files."
    root, sizes = tmp_path/'world', dict(SMALL, n_train=40)
    run = start(root, sizes, start_new_session=True)
    limit = time.monotonic() + 60
    while len(images(root)) < after and time.monotonic() < limit: time.sleep(.01)
    os.kill(run.pid, signal.SIGKILL); run.wait()
    def members(): return [p for p in Path('/proc').glob('[0-9]*/stat') if p.exists() and _session(p) == run.pid]
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

SLOW = """
import random, time, multigrain.world as w
def late(f):
    def g(*a): x = f(*a); time.sleep(random.uniform(0, .1)); return x
    return g
for name in ('put_image', 'write_file', 'read_manifest'): setattr(w, name, late(getattr(w, name)))
time.sleep(random.uniform(0, .3))
"""

def test_callers_at_once(world, tmp_path):
    "Some calls for one new folder, the time between looking and writing stretched: one draws, the others wait."
    for i in range(3):
        runs = [start(tmp_path/f'world{i}', before=SLOW) for _ in range(3)]
        for run in runs: _, err = run.communicate(timeout=240); assert run.returncode == 0, err
        assert images(tmp_path/f'world{i}') == images(world)

def test_manifest_is_the_first_and_the_last_file(tmp_path, monkeypatch):
    "First, so that no other caller takes a new world for a stranger's folder; last, so that `complete` is true."
    written = []
    def noted(f): return lambda path, data: (written.append(path.name), f(path, data))
    for name in ('put_image', 'write_file'): monkeypatch.setattr(module, name, noted(getattr(module, name)))
    make_world(tmp_path/'world', processes=1, progress=False, **SMALL)
    assert written[0] == written[-1] == 'world.json' and written.count('world.json') == 2 and len(written) > 100

def test_unguarded_script_is_told_so(tmp_path):
    "A script without `if __name__ == '__main__':` ends with a sentence; it must not hang."
    (tmp_path/'script.py').write_text(CALL.format(root=str(tmp_path/'world'), processes=2, sizes=SMALL))
    done = subprocess.run([sys.executable, tmp_path/'script.py'], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "if __name__ == '__main__'" in done.stderr.strip().splitlines()[-1]

def test_read_by_the_readers(world, monkeypatch, tmp_path):
    monkeypatch.setenv('MULTIGRAIN_CACHE', str(tmp_path))
    def n(read, folder, *part): return len(read(world/folder, *part, incomplete=True)) # fewer than the real sets
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert [n(imagenet, '', o) for o in ('train', 'val')] == [12, 6]
        assert [n(holidays, 'holidays'), n(ukbench, 'ukbench'), len(distractors(world/'distractors'))] == [11, 12, 5]
        assert [n(copydays, 'copydays', o) for o in ('strong', 'crops/50', 'jpeg/3')] == [3 + 4, 3 + 3, 3 + 3]
