"Any file is survived: damaged images and archives, files made to keep a parser busy, folders and JSON of strangers."
import hashlib, json, os, shutil, struct, sys, tempfile, threading, time, warnings, zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np, pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save as to_bytes

sys.path.insert(0, str(Path(__file__).parent))
import fuzz
from fuzz import check_archive, check_image, cuts, damaged, draw, encoded
import multigrain.image
from multigrain.catalog import open_model
from multigrain.datasets import read_split
from multigrain.embed import embed, read_embeddings
from multigrain.image import BadImage, load_image, read_header
from multigrain.loading import test_loader as squares, train_loader
from multigrain.model import ModelDescription, MultiGrain, describe, load, save, tensors_digest
from multigrain.readers import image_folder
from multigrain.runs import BadState, Run, complete_runs, list_runs, load_state, save_state
from multigrain.search import Index
from multigrain.sets import content_hash

IMAGES, ARCHIVES = fuzz.images(), fuzz.archives()

@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    "Every test has a cache of its own."
    monkeypatch.setenv('MULTIGRAIN_CACHE', str(tmp_path_factory.mktemp('cache')))

@pytest.fixture
def fast():
    "A folder in memory: thousands of small files, one after the other."
    place = Path(tempfile.mkdtemp(dir='/dev/shm' if os.path.isdir('/dev/shm') else None))
    yield place
    shutil.rmtree(place)

def peak()->float: # megabytes
    "The most memory that this process has had since `start_peak`."
    lines = Path('/proc/self/status').read_text().splitlines()
    return int(next(o for o in lines if o.startswith('VmHWM')).split()[1])/1e3

def start_peak()->float: Path('/proc/self/clear_refs').write_text('5'); return peak()

linux = pytest.mark.skipif(not Path('/proc/self/clear_refs').exists(), reason='memory is measured on Linux')


# damaged files: `python tests/fuzz.py` goes on where this ends

@pytest.mark.parametrize('name', IMAGES)
@pytest.mark.filterwarnings('ignore')  # Pillow's remarks on broken files
def test_every_cut(fast, name, capfd):
    for data in cuts(IMAGES[name]): check_image(data, fast/'x.jpg')

@linux
@pytest.mark.filterwarnings('ignore')
def test_seeded_damage_to_images(fast, capfd):
    "500 files: a sentence or a picture, in two seconds each and in less than a gigabyte."
    rng, base = np.random.default_rng(0), start_peak()
    for name in rng.choice(list(IMAGES), 500): check_image(damaged(IMAGES[name], rng), fast/'x.jpg')
    assert peak() - base < 1000

@pytest.mark.parametrize('name', ARCHIVES)
def test_damaged_archives(fast, name):
    data, rng = ARCHIVES[name], np.random.default_rng(0)
    for n in range(0, len(data), 1 + len(data)//60): check_archive(data[:n], fast/'x')
    for _ in range(60): check_archive(damaged(data, rng), fast/'x')

ODD = {'exif': IMAGES['webp'].replace(b'II*\0', b'none').replace(b'MM\0*', b'none'), 'cut': IMAGES['moving'][:900],
       'text': b'no image', 'empty': b'', 'half': IMAGES['png'][:300]}

def test_a_folder_of_odd_files_goes_on(tmp_path):
    "Index, loaders and embedding leave out what cannot be used, by name, and nothing else."
    (root := tmp_path/'set').mkdir()
    for i in range(6): (root/f'good{i}.jpg').write_bytes(encoded(draw(40, 50, i)))
    for name, data in ODD.items(): (root/f'{name}.jpg').write_bytes(data)
    for at in range(400, len(IMAGES['moving']), 203): (root/f'gif{at}.gif').write_bytes(IMAGES['moving'][:at])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        images = image_folder(root, bad='skip')
        loader = train_loader(images, s=16, batch_size=2*len(images), m=2, iterations=2, bad='skip')
        found = embed(MultiGrain('mini', n_classes=2), images, 32, bad='skip', progress=False)
        assert all(len(o.image) for o in loader)
        list(rest := squares(images, 16, bad='skip'))
    names = {Path(o).name for o in found.images.paths}
    assert {f'good{i}.jpg' for i in range(6)} | {'exif.jpg'} <= names
    out = {Path(o).name: why for o, why in found.skipped.items()}
    assert {'text.jpg', 'empty.jpg', 'half.jpg'} <= out.keys() and not names & out.keys()
    assert len(names) + len(out) == len(list(root.iterdir())) and '' not in out.values()
    assert {Path(o).name for o in rest.skipped} <= out.keys()


# files that keep a parser busy, or want all memory

def chunk(kind, data=b''):
    return struct.pack('>I4s', len(data), kind) + data + struct.pack('>I', zlib.crc32(kind + data))

PNG, JPEG, GIF = IMAGES['png'], IMAGES['jpeg'], IMAGES['gif']
BUSY = {'filling': b'\xff\xd8' + b'\xff'*20_000_000, 'restarts': b'\xff\xd8' + b'\xff\xd0'*10_000_000,
        'empty APP0': b'\xff\xd8' + b'\xff\xe0\0\2'*5_000_000, 'zeros': PNG[:33] + bytes(20_000_000),
        'empty IDAT': PNG[:33] + chunk(b'IDAT')*1_600_000, 'tEXt': PNG[:33] + chunk(b'tEXt', b'a\0b')*1_000_000,
        'filling in the middle': JPEG.replace(b'\xff\xda', b'\xff'*20_000_000 + b'\xff\xda', 1),
        'blocks of one byte': GIF[:GIF.index(b',') + 10] + b'\2' + b'\1\0'*10_000_000,
        'comments': GIF[:-1] + b'\x21\xfe\1a\0'*4_000_000 + b';', 'ppm comment': b'P6 #' + b' '*20_000_000,
        'rle': b'BM' + struct.pack('<IHHIIiiHHIIiiII', 0, 0, 0, 1078, 40, 4000, 4000, 1, 8, 1, 0, 0, 0, 256, 0)
               + bytes(1024) + b'\1\5'*5_000_000}

@pytest.mark.parametrize('name', BUSY)
@pytest.mark.filterwarnings('ignore')
def test_no_file_keeps_a_parser_busy(fast, name, monkeypatch):
    "Twenty megabytes of nothing: an answer in two seconds, also by Pillow alone."
    (path := fast/'busy.jpg').write_bytes(BUSY[name])
    monkeypatch.setattr(multigrain.image, 'simplejpeg', None)
    for look in (read_header, load_image):
        begun = time.process_time()
        try: look(path)
        except BadImage as e: assert '\n' not in str(e)
        assert time.process_time() - begun < 4  # two on a machine that is not busy with other things

def bomb(h, w, depth=16):
    "A PNG of zeros: a few hundred kilobytes for any number of pixels."
    packer, rows = zlib.compressobj(9), (1 + w*depth//8)
    data = b''.join(packer.compress(bytes(rows*100)) for _ in range(h//100)) + packer.flush()
    head = chunk(b'IHDR', struct.pack('>IIBBBBB', w, h, depth, 0, 0, 0, 0))
    return b'\x89PNG\r\n\x1a\n' + head + chunk(b'IDAT', data) + chunk(b'IEND')

@linux
@pytest.mark.filterwarnings('ignore')
def test_eight_bombs_at_once_share_a_budget(fast, monkeypatch):
    "Large images, eight threads: with a budget their memory is that of one and what it leaves, not that of eight."
    (path := fast/'bomb.png').write_bytes(bomb(5000, 5000))
    assert path.stat().st_size < 100_000
    def most(total):
        monkeypatch.setattr(multigrain.image, '_MEMORY', multigrain.image._Budget(total))
        monkeypatch.setattr(multigrain.image, 'DECODE_BYTES', total)
        multigrain.image._trim()
        base = start_peak()
        def one(_): return load_image(path)[:, ::4000, ::4000].clone().unique().tolist()
        with ThreadPoolExecutor(8) as pool: assert list(pool.map(one, range(8))) == [[0]]*8
        return peak() - base
    assert most(200_000_000) < 500 < most(2_000_000_000)

def test_decodes_wait_for_each_other(tmp_path, monkeypatch):
    "With a budget of two images, no more than two are decoded at once."
    for i in range(8): (tmp_path/f'{i}.jpg').write_bytes(encoded(draw(600, 800, i)))
    monkeypatch.setattr(multigrain.image, '_MEMORY', multigrain.image._Budget(2*7*600*800))
    monkeypatch.setattr(multigrain.image, 'DECODE_BYTES', 2*7*600*800)
    lock, now, most, real = threading.Lock(), 0, 0, multigrain.image._fast_rgb
    def slow(*args):
        nonlocal now, most
        with lock: now += 1; most = max(most, now)
        time.sleep(.01)
        with lock: now -= 1
        return real(*args)
    monkeypatch.setattr(multigrain.image, '_fast_rgb', slow)
    with ThreadPoolExecutor(8) as pool: list(pool.map(load_image, sorted(tmp_path.iterdir())))
    assert most == 2

def test_zeros_after_a_power_cut(tmp_path):
    "The second half of a compressed picture is refused, zeros behind its end are not."
    full = draw(300, 400).effect_spread(20)
    for big in (encoded(full), encoded(full, progressive=True), encoded(full.convert('CMYK')), encoded(full, 'GIF'),
                encoded(full, 'WEBP'), encoded(full, 'PNG'), encoded(full, 'AVIF'), encoded(full, 'JPEG2000')):
        (path := tmp_path/'x.jpg').write_bytes(big[:len(big)//2] + bytes(len(big) - len(big)//2))
        with pytest.raises(BadImage): load_image(path)
        path.write_bytes(big)
        assert load_image(path).shape == (3, 300, 400)
    path.write_bytes(encoded(draw(300, 400)) + bytes(9000))
    assert load_image(path).shape == (3, 300, 400)

def test_links_that_lead_to_themselves(tmp_path):
    (tmp_path/'a').mkdir()
    (tmp_path/'a/1.jpg').write_bytes(encoded(draw()))
    os.symlink('loop', tmp_path/'a/loop'); os.symlink('x.jpg', tmp_path/'a/x.jpg')
    with pytest.raises(BadImage, match='x.jpg cannot be opened'): image_folder(tmp_path)
    with pytest.warns(UserWarning, match='1 image left out'): assert len(image_folder(tmp_path, bad='skip')) == 1


# folders and JSON of strangers

ANY = st.recursive(st.none() | st.booleans() | st.integers(-10**20, 10**20) | st.floats() | st.text(max_size=20),
                   lambda o: st.lists(o, max_size=4) | st.dictionaries(st.text(max_size=8), o, max_size=4),
                   max_leaves=12)
quick = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

def mixed(good:dict):
    "A good dictionary of which some values are anything, some keys are gone, or anything at all."
    def change(o): return {k: v for k, v in (good | o[0]).items() if k not in o[1]}
    some = st.dictionaries(st.sampled_from(sorted(good)), ANY, max_size=3)
    return st.tuples(some, st.sets(st.sampled_from(sorted(good)), max_size=2)).map(change) | ANY

def survives(f, *kinds):
    "A result, or one of these errors in one line of bounded length."
    try: return f()
    except kinds as e: assert str(e) and '\n' not in str(e) and len(str(e)) < 2000, e

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    save(MultiGrain('mini', n_classes=3), place := tmp_path_factory.mktemp('stranger')/'net')
    return place

@quick
@given(found=mixed(dict(name='net', s=32, data='world')))
def test_about(folder, found):
    (folder/'about.json').write_text(json.dumps(found))
    opened = survives(lambda: open_model(str(folder)), ValueError)
    assert opened is None or '/' not in opened.name and type(opened.s) is int and isinstance(opened.data, str)

def test_names_that_leave_their_folder(folder):
    for about in (dict(name='../../..'), dict(name='/etc/x'), dict(s='32'), dict(s=10**9), dict(data=[1])):
        (folder/'about.json').write_text(json.dumps(about))
        with pytest.raises(ValueError, match='about.json is not to be trusted'): open_model(str(folder))
    (folder/'about.json').unlink()

NET = MultiGrain(torch.nn.Conv2d(3, 2, 3, 2), n_classes=2)

@linux
def test_descriptions_of_models(tmp_path):
    "Forged with the right hash: refused before anything is built."
    state, base = {k: v.contiguous() for k, v in NET.state_dict().items()}, start_peak()
    @quick
    @given(about=mixed(json.loads(describe(NET).to_text()) | dict(trunk='mini')))
    def forged(about):
        text = json.dumps(about)
        header = dict(multigrain=text, sha256=tensors_digest(text, state))
        (tmp_path/'model.safetensors').write_bytes(to_bytes(state, header))
        survives(lambda: load(tmp_path), ValueError)
    forged()
    assert ModelDescription._fields and peak() - base < 500

def test_records_of_runs(tmp_path):
    good = dict(parameters=dict(resolution=32, data='world'), complete=True, started='', result={}, finished='2026')
    (run := tmp_path/'x-1').mkdir()
    @quick
    @given(found=mixed(good))
    def forged(found):
        (run/'run.json').write_text(json.dumps(found))
        for f in (lambda: Run(run).record, lambda: Run(run).complete, lambda: Run(run).result,
                  lambda: complete_runs(tmp_path), lambda: list_runs(tmp_path), lambda: open_model(str(run))):
            survives(f, ValueError, FileNotFoundError)
    forged()

def test_lines_of_runs(tmp_path):
    run = Run(tmp_path)
    @quick
    @given(st.binary(max_size=60) | st.lists(ANY, max_size=3).map(lambda o: '\n'.join(map(json.dumps, o)).encode()))
    def forged(data):
        (tmp_path/'timing.jsonl').write_bytes(data)
        assert all(isinstance(o, dict) for o in run.lines('timing.jsonl', 'skip'))
        survives(lambda: run.lines('timing.jsonl'), ValueError)
    forged()

def test_states(tmp_path):
    tensors = dict(w=torch.ones(3))
    @quick
    @given(ANY)
    def forged(info):
        text = json.dumps(info)
        (tmp_path/'s').write_bytes(to_bytes(tensors, dict(info=f'{tensors_digest(text, tensors)} {text}')))
        survives(lambda: load_state(tmp_path/'s'), BadState)
    forged()
    save_state(tmp_path/'s', tensors, {})
    rng, whole = np.random.default_rng(0), (tmp_path/'s').read_bytes()
    for _ in range(200):
        (tmp_path/'s').write_bytes(other := damaged(whole, rng))
        if other != whole: assert survives(lambda: load_state(tmp_path/'s'), BadState) is None

def test_manifests_of_embeddings(tmp_path):
    (root := tmp_path/'set').mkdir()
    for i in range(3): (root/f'{i}.jpg').write_bytes(encoded(draw(40, 50, i)))
    embed(MultiGrain('mini', n_classes=2), root, 32, folder=tmp_path/'out', progress=False)
    good, paths = (json.loads((tmp_path/'out'/o).read_text()) for o in ('manifest.json', 'paths.json'))
    @quick
    @given(mixed(good), mixed(good['record']), st.just(paths) | ANY)
    def forged(manifest, record, names):
        for content in (manifest, good | dict(record=record)):
            (tmp_path/'out'/'manifest.json').write_text(json.dumps(content))
            (tmp_path/'out'/'paths.json').write_text(json.dumps(names))
            survives(lambda: read_embeddings(tmp_path/'out'), ValueError)
    forged()
    (tmp_path/'out'/'manifest.json').write_text(json.dumps(good))
    (tmp_path/'out'/'paths.json').write_text(json.dumps(paths))
    rng = np.random.default_rng(0)
    whole = (tmp_path/'out'/'embeddings.npy').read_bytes()
    for _ in range(100):
        (tmp_path/'out'/'embeddings.npy').write_bytes(damaged(whole[:128], rng) + whole[128:])
        survives(lambda: read_embeddings(tmp_path/'out'), ValueError)

def test_splits(tmp_path):
    good = dict(source='data', per_class=2, seeds=3, parts=dict(pool=dict(a=['1', '2'])))
    @quick
    @given(mixed(good))
    def forged(found):
        (tmp_path/'split.json').write_text(json.dumps(found))
        survives(lambda: read_split(tmp_path/'split.json'), ValueError)
    forged()

@pytest.fixture(scope='module')
def indexed(tmp_path_factory):
    "An index of five images, its generation, and a query."
    (root := (place := tmp_path_factory.mktemp('indexed'))/'set').mkdir()
    for i in range(5): (root/f'{i}.jpg').write_bytes(encoded(draw(40, 50, i)))
    net = MultiGrain('mini', n_classes=2)
    index = Index.build(root, net, place/'index', 32, hashes=True, classes=['a', 'b'], progress=False)
    return index, net, place/'index'/'generation-000001', index.describe(root/'3.jpg')

def rewrite(folder, manifest):
    "A manifest with the hash that belongs to it, as a stranger would write it."
    known = {k: v for k, v in manifest.items() if k != 'hash'} if isinstance(manifest, dict) else manifest
    if isinstance(known, dict):
        digest = hashlib.blake2b(json.dumps(known).encode(), digest_size=16).hexdigest()
        known = known | dict(hash=digest)
    (folder/'manifest.json').write_text(json.dumps(known))

@linux
def test_manifests_of_indexes(indexed):
    "Forged with the right hash: one sentence, and no memory for numbers that a file only speaks of."
    index, net, place, asked = indexed
    folder, base = place.parent, start_peak()
    whole = (folder/'manifest.json').read_bytes()
    good = json.loads(whole)
    def ask(): return index.open(folder, net).answer(asked, 'copy', 3)
    @quick
    @given(mixed(good), st.sampled_from('record settings search copy files hashes measured'.split()), st.data())
    def forged(manifest, part, data):
        for content in (manifest, good | {part: data.draw(mixed(good[part]))}):
            rewrite(folder, content)
            survives(ask, ValueError)
    try:
        forged()
        for odd in (dict(n=10**12), dict(n=4), dict(generation=-1), dict(files=good['files'] | {'../../x': 1}),
                    dict(record=good['record'] | dict(s=10**9)), dict(record=good['record'] | dict(dim=10**12)),
                    dict(classes=['a']), dict(settings=good['settings'] | dict(thumbnail=10**9))):
            rewrite(folder, good | odd)
            with pytest.raises(ValueError, match='damaged|build the index again'): ask()
    finally: (folder/'manifest.json').write_bytes(whole)
    assert peak() - base < 300 and ask()

def test_names_of_an_index_are_as_many_as_its_images(indexed):
    "Shorter, longer, no names: refused, though their hash is right."
    index, net, place, asked = indexed
    kept = {o: o.read_bytes() for o in (place/'paths.json', place.parent/'manifest.json')}
    manifest = json.loads(kept[place.parent/'manifest.json'])
    try:
        for names in (index.paths[:4], index.paths + ['x'], [1]*5, dict(a=1), 7):
            (place/'paths.json').write_text(json.dumps(names))
            manifest['files']['paths.json'] = (place/'paths.json').stat().st_size
            manifest['hashes']['paths.json'] = content_hash(place/'paths.json')
            rewrite(place.parent, manifest)
            with pytest.raises(ValueError, match='paths.json is damaged'): Index.open(place.parent, net)
    finally:
        for o, data in kept.items(): o.write_bytes(data)

def same_json(*texts):
    "Do they say the same? A last digit of a long number may change nothing."
    try: a, b = map(json.loads, texts)
    except ValueError: return False
    return a == b

def test_flips_in_an_index(indexed):
    "200 seeded bits: an answer is right or a sentence, and verify finds every bit of what was written."
    index, net, place, asked = indexed
    rng, right = np.random.default_rng(0), index.answer(asked, 'instance', 5)
    files = [o for o in (*sorted(place.iterdir()), place.parent/'manifest.json') if o.stat().st_size]
    for i in range(200):
        data = (file := files[i % len(files)]).read_bytes()
        at = int(rng.integers(len(data)))
        other = data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1:]
        file.write_bytes(other)
        try:
            found = survives(lambda: Index.open(place.parent, net).answer(asked, 'instance', 5), ValueError)
            checked = survives(lambda: Index.open(place.parent, net).verify(), ValueError)
            assert found is None or list(found) == list(right), file
            said = file.name in ('embeddings.npy', 'distractors.npy') and at < 128 # the head of an array
            assert checked is None or said or same_json(data, other), (file, at)
        finally: file.write_bytes(data)
    assert Index.open(place.parent, net).verify() > 0
