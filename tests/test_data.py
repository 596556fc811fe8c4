"Hostile files, whole benchmarks and broken surroundings, through image, sets, readers and download."
import functools, hashlib, http.server, io, json, multiprocessing, os, pickle, threading, warnings, zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
import numpy as np, pytest, torch
from PIL import Image, ImageOps
import multigrain.image, multigrain.sets
from multigrain.download import download, extract
from multigrain.image import BadImage, load_image, read_header
from multigrain.readers import caltech101, cifar10, copydays, distractors, holidays, image_folder
from multigrain.readers import imagenet, imagenette, in_aug, ukbench
from multigrain.sets import duplicates, join


def draw(h=24, w=32, seed=0):
    "A synthetic picture: smooth noise."
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((w, h), Image.Resampling.BICUBIC)

def encoded(im, kind='JPEG', **how):
    im.save(b := io.BytesIO(), kind, **how)
    return b.getvalue()

def put(root, **files):
    "Files of given content; `__` stands for a folder, the ending is .jpg."
    for name, content in files.items():
        path = root/(name.replace('__', '/') + '.jpg')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root

def pixels(im): return torch.from_numpy(np.array(im.convert('RGB'))).permute(2, 0, 1)

@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    "Every test has a cache of its own."
    folder = tmp_path_factory.mktemp('cache')
    monkeypatch.setenv('MULTIGRAIN_CACHE', str(folder))
    return folder


# decoding

@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'WEBP', 'TIFF', 'AVIF'])
@pytest.mark.parametrize('orientation', range(1, 9))
def test_orientation(tmp_path, kind, orientation):
    "Index and decoder agree with Pillow, for every orientation and format."
    tag = Image.Exif(); tag[0x112] = orientation
    (path := tmp_path/'a.jpg').write_bytes(encoded(draw(20, 32), kind, exif=tag))
    expected = ImageOps.exif_transpose(Image.open(path))
    images = image_folder(tmp_path)
    assert tuple(images.sizes[0]) == (expected.height, expected.width)
    assert torch.equal(images.load(0), pixels(expected))

@pytest.fixture(params=['simplejpeg', 'Pillow'])
def decoder(request, monkeypatch):
    "With and without the optional package."
    if request.param == 'Pillow': monkeypatch.setattr(multigrain.image, 'simplejpeg', None)
    elif multigrain.image.simplejpeg is None: pytest.skip('simplejpeg is not installed')

def test_unusual_jpegs(tmp_path, decoder):
    "Several pictures in one file, RGB without YCC, grey, CMYK, progressive, bytes after the end or before a marker."
    plain = encoded(draw())
    cases = {'mpo': encoded(draw(), 'MPO', save_all=True, append_images=[draw(seed=1)]),
             'rgb': encoded(draw(), keep_rgb=True), 'grey': encoded(draw().convert('L')),
             'cmyk': encoded(draw().convert('CMYK')), 'progressive': encoded(draw(), progressive=True),
             'after': plain + bytes(1000), 'stray': plain[:-2] + b'\0\1\2' + plain[-2:]}
    for name, content in cases.items():
        (path := tmp_path/f'{name}.jpg').write_bytes(content)
        assert torch.equal(load_image(path), pixels(Image.open(path))), name

@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'GIF', 'TIFF', 'WEBP', 'BMP'])
@pytest.mark.filterwarnings('ignore::UserWarning')  # Pillow's remarks on broken TIFF files
def test_damaged_files_raise_one_kind_of_error(tmp_path, decoder, kind):
    "Cut anywhere, or with bytes changed: an image of the size that was announced, or BadImage in one sentence."
    whole, rng, path = encoded(draw(40, 60), kind), np.random.default_rng(0), tmp_path/'x.jpg'
    for i in range(60):
        broken = bytearray(whole[:rng.integers(len(whole))] if i % 2 else whole)
        if i % 2 == 0:
            for at in rng.integers(0, min(len(broken), 400), 3): broken[at] = rng.integers(256)
        path.write_bytes(broken)
        try: shape = tuple(load_image(path).shape)
        except BadImage as e:
            assert str(e).startswith(f'{path} ') and '\n' not in str(e) and e.path == str(path)
        else: assert shape[0] == 3 and sorted(shape[1:]) == sorted(read_header(path)[1:3])

def test_bomb_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    "A few hundred bytes that claim gigabytes are refused from the header."
    wide = encoded(draw(8, 8))
    at = wide.index(b'\xff\xc0')
    (tmp_path/'bomb.jpg').write_bytes(wide[:at+5] + b'\xff\xff\xff\xff' + wide[at+9:])
    monkeypatch.setattr(multigrain.image, '_decode', lambda *a: pytest.fail('it was decoded'))
    with pytest.raises(BadImage, match='bomb.jpg claims 65535 x 65535 pixels, more than max_pixels'):
        load_image(tmp_path/'bomb.jpg')

def test_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path/'pipe.jpg')
    with pytest.raises(BadImage, match='pipe.jpg is empty'): load_image(tmp_path/'pipe.jpg')


# the index

HOSTILE = {'a__text': b'no photograph', 'b__empty': b'', 'b__thread': encoded(draw(1, 5000), 'PNG'),
           'c__dot': encoded(draw(1, 1), 'PNG')}

def test_bad_files_in_a_set(tmp_path):
    root = put(tmp_path/'set', a__1=encoded(draw()), b__2=encoded(draw(seed=1)), c__3=encoded(draw(seed=2)), **HOSTILE)
    with pytest.raises(BadImage, match=r"a/text.jpg is not an image .*bad='skip' \(3 more files of set"):
        image_folder(root)
    with pytest.warns(UserWarning, match='4 images left out with 4 that cannot be used'):
        images = image_folder(root, bad='skip')
    assert [Path(p).name for p in images.paths] == ['1.jpg', '2.jpg', '3.jpg'] and images.classes == ['a', 'b', 'c']
    assert sorted(Path(p).name for p in images.bad) == ['dot.jpg', 'empty.jpg', 'text.jpg', 'thread.jpg']
    assert len(json.loads(json.dumps(images.record()))['bad']) == 4

def test_one_bad_view_takes_its_group(tmp_path):
    root = put(tmp_path, **{f'ukbench{i:05}': encoded(draw(seed=i)) for i in range(12)})
    (root/'ukbench00005.jpg').write_bytes(b'')
    with pytest.warns(UserWarning, match='4 images left out with 1 that cannot be used'):
        images = ukbench(root, incomplete=True, bad='skip')
    assert images.groups.tolist() == [0]*4 + [2]*4

def test_unreadable_folder_and_dangling_link(tmp_path, monkeypatch):
    root, scandir = put(tmp_path/'set', a__1=encoded(draw()), b__2=encoded(draw())), os.scandir
    def locked(path):
        if str(path).rstrip('/').endswith('b'): raise PermissionError(13, 'Permission denied')
        return scandir(path)
    monkeypatch.setattr(os, 'scandir', locked)
    with pytest.raises(ValueError, match=r'1 folder that cannot be read, the first is b/ \(Permission denied\)'):
        image_folder(root)
    assert '1 folder could not be read' in image_folder(root, incomplete=True).note
    monkeypatch.undo()
    os.symlink(root/'gone.jpg', root/'a/dangling.jpg')
    with pytest.raises(BadImage, match='a/dangling.jpg cannot be opened'): image_folder(root, cache=False)

def test_names_that_are_not_text(tmp_path):
    name = os.fsdecode(b'caf\xe9\n.jpg')
    try: (tmp_path/name).write_bytes(encoded(draw()))
    except OSError: pytest.skip('the file system takes no such names')
    for _ in range(2): assert image_folder(tmp_path).load(0).shape == (3, 24, 32)  # the second time from the cache

def test_cache_life(tmp_path, cache, monkeypatch):
    "Built once, followed when files change, built again when it is damaged, done without when it cannot be written."
    root, opened = put(tmp_path/'set', **{f'a__{i}': encoded(draw(seed=i)) for i in range(9)}), []
    real = multigrain.sets._index_row
    monkeypatch.setattr(multigrain.sets, '_index_row', lambda path, *a: opened.append(path) or real(path, *a))
    def count(**how):
        opened.clear(); images = image_folder(root, **how)
        return len(opened), images.fingerprint
    first = count()
    assert first[0] == 9 and count() == (0, first[1])
    file, = cache.iterdir()
    with zipfile.ZipFile(file) as z:
        for name in z.namelist(): # no pickle inside
            np.lib.format.read_array(io.BytesIO(z.read(name)), allow_pickle=False)
    for damage in (b'', b'text', file.read_bytes()[:-40]):
        file.write_bytes(damage)
        with pytest.warns(UserWarning, match='is damaged'): assert count() == first
    (root/'a/3.jpg').write_bytes(encoded(draw(50, 60))); (root/'a/4.jpg').unlink(); put(root, a__new=encoded(draw()))
    assert count()[0] == 2 and count()[0] == 0
    with pytest.warns(UserWarning, match='could not be kept'):
        assert count(cache=file)[0] == 9  # a file in place of the folder
    assert sorted(p.name for p in cache.iterdir()) == [file.name]

def fingerprint(root):
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        return image_folder(root).fingerprint

def test_two_processes_build_one_index(tmp_path, cache):
    root = put(tmp_path/'set', **{f'a__{i}': encoded(draw(seed=i)) for i in range(200)})
    with ProcessPoolExecutor(2, multiprocessing.get_context('fork')) as pool:
        said = set(pool.map(fingerprint, [root]*6))
    assert said == {image_folder(root).fingerprint}
    assert len(list(cache.iterdir())) == 1

def test_order_does_not_depend_on_the_directory(tmp_path, monkeypatch):
    root, scandir = put(tmp_path, **{f'{c}__{i}': encoded(draw()) for c in 'ab' for i in range(5)}), os.scandir
    first = image_folder(root).paths
    monkeypatch.setattr(os, 'scandir', lambda path: iter(list(scandir(path))[::-1]))
    assert image_folder(root).paths == first

def test_duplicates_between_train_and_val(tmp_path):
    same = encoded(draw(seed=5))
    train = image_folder(put(tmp_path/'train', a__1=encoded(draw(seed=1)), a__2=same))
    said = '1 file also in train, the first is .*val/a/7.jpg, the same as .*train/a/2.jpg'
    with pytest.warns(UserWarning, match=said):
        val = image_folder(put(tmp_path/'val', a__7=same, a__8=encoded(draw(seed=8))), apart_from=train)
    assert len(duplicates(train, val)) == 1 and '1 file also in train' in val.note


# benchmarks

def test_whole_ukbench(tmp_path):
    one = encoded(draw())
    for i in range(10200): (tmp_path/f'ukbench{i:05}.jpg').write_bytes(one)
    images = ukbench(tmp_path)
    assert len(images) == 10200 and len(np.unique(images.groups)) == 2550 and not images.missing and not images.note
    assert (np.bincount(images.groups) == 4).all() and len(images.queries) == len(images.database) == 10200

def test_cd10k_and_its_parts(tmp_path):
    one, root = encoded(draw()), tmp_path/'copydays'
    crops = [f'crops/{i}' for i in (10, 15, 20, 30, 40, 50, 60, 70, 80)]
    jpegs = [f'jpegqual/{i}' for i in (3, 5, 8, 10, 15, 20, 30, 50, 75)]
    for part in ('original', 'strong', *crops, *jpegs):
        (root/part).mkdir(parents=True)
        strong = part == 'strong'
        for i in range(229 if strong else 157):
            (root/part/f'{2000 + i%157}{1 + i//157 if strong else 0:02}.jpg').write_bytes(one)
    expected = {'strong': 229, 'crops': 1413, 'jpeg': 1413, 'crops/10': 157, 'jpeg/75': 157}
    assert {o: len(copydays(root, o).queries) for o in expected} == expected
    far = put(tmp_path/'far', **{f'{i}': one for i in range(30)})
    whole = join(copydays(root), distractors(far))
    for i in whole.queries:  # each copy has its original, once, among all that is searched
        found = [j for j in whole.database if whole.groups[j] == whole.groups[i]]
        assert len(found) == 1 and Path(whole.paths[found[0]]).name[:4] == Path(whole.paths[i]).name[:4]

def test_flat_and_sorted_imagenet_agree(tmp_path):
    "The flat folder with its devkit gives the labels of the class folders."
    scipy_io = pytest.importorskip('scipy.io')
    wnids, rng = [f'n{i:08}' for i in np.random.default_rng(0).permutation(1000)], np.random.default_rng(1)
    fields = [('ILSVRC2012_ID', object), ('WNID', object), ('words', object)]
    rows = [[(i + 1, wnid, f'thing {i}')] for i, wnid in enumerate(wnids)]
    synsets = np.array(rows + [[(1001, 'n99999999', 'entity')]], fields)
    devkit = tmp_path/'ILSVRC2012_devkit_t12/data'; devkit.mkdir(parents=True)
    scipy_io.savemat(devkit/'meta.mat', {'synsets': synsets}, do_compression=True)
    truth = rng.integers(1, 1001, 60)
    (devkit/'ILSVRC2012_validation_ground_truth.txt').write_text('\n'.join(map(str, truth)))
    for i, number in enumerate(truth, 1):
        for folder in (tmp_path/'ILSVRC2012_img_val', tmp_path/'sorted/val'/wnids[number - 1]):
            folder.mkdir(parents=True, exist_ok=True)
            (folder/f'ILSVRC2012_val_{i:08}.JPEG').write_bytes(encoded(draw()))
    flat = imagenet(tmp_path, incomplete=True)
    folders = imagenet(tmp_path/'sorted', incomplete=True, classes=flat.classes)
    assert flat.classes == sorted(wnids)
    def named(images): return {Path(p).name: l for p, l in zip(images.paths, images.labels)}
    assert named(flat) == named(folders)

def test_holidays_rotation_replaces_exif(tmp_path):
    tag = Image.Exif(); tag[0x112] = 3
    put(tmp_path, jpg__100000=encoded(draw(20, 32)), jpg__100001=encoded(draw(20, 32), exif=tag))
    (tmp_path/'turn.yaml').write_text('"100000.jpg": 90')
    plain = holidays(tmp_path, incomplete=True)
    turned = holidays(tmp_path, rotations=tmp_path/'turn.yaml', incomplete=True)
    stored = [load_image(p, turn=0) for p in plain.paths]
    assert torch.equal(plain.load(1), stored[1].rot90(2, (1, 2))) and torch.equal(turned.load(1), stored[1])
    assert torch.equal(turned.load(0), stored[0].rot90(-1, (1, 2))) and turned.sizes.tolist() == [[32, 20], [20, 32]]
    assert 'no rotation list used' in plain.note and 'rotation list used, 1 image turned' in turned.note
    assert plain.fingerprint != turned.fingerprint

def test_in_aug_is_the_same_everywhere(tmp_path):
    files = {f'{c}__{i}': encoded(draw(seed=i)) for c in 'abc' for i in range(6)}
    for where in ('here', 'there'): put(tmp_path/where, **files)
    a, b = (in_aug(image_folder(tmp_path/where, name='x'), seed=3) for where in ('here', 'there'))
    assert a.fingerprint == b.fingerprint and len(a) == 3*2*5
    assert [Path(p).name for p in a.paths] == [Path(p).name for p in b.paths]


# torchvision's sets, archives, downloads

def test_cifar10_through_torchvision(tmp_path, monkeypatch):
    "The real torchvision class, on small files of the same layout."
    from torchvision.datasets import CIFAR10
    folder, rng = tmp_path/'cifar-10-batches-py', np.random.default_rng(0)
    folder.mkdir()
    def keep(name, content):
        (folder/name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder/name).read_bytes()).hexdigest()]
    batch = dict(data=rng.integers(0, 256, (4, 3072), dtype=np.uint8), labels=[1, 0, 1, 0])
    meta = keep('batches.meta', dict(label_names=['plane', 'car']))[1]
    monkeypatch.setattr(CIFAR10, 'train_list', [keep('data_batch_1', batch)])
    monkeypatch.setattr(CIFAR10, 'test_list', [keep('test_batch', batch)])
    monkeypatch.setattr(CIFAR10, 'meta', dict(filename='batches.meta', key='label_names', md5=meta))
    images = cifar10(tmp_path, 'val')
    assert images.labels.tolist() == [1, 0, 1, 0] and images.classes == ['plane', 'car']
    assert torch.equal(images.load(2), torch.from_numpy(batch['data'][2].reshape(3, 32, 32)))
    (folder/'test_batch').write_bytes(b'changed')
    with pytest.raises(ValueError, match='does not hold CIFAR10 .*cifar-10-python.tar.gz'): cifar10(tmp_path, 'val')

@pytest.mark.parametrize('read, put', [(cifar10, 'cifar-10-batches-py'), (imagenette, 'imagenette2-160'),
                                       (caltech101, 'caltech101/101_ObjectCategories')])
def test_offline(tmp_path, monkeypatch, read, put):
    "Without a network the error says what to put where."
    import urllib.error, urllib.request
    def no_network(*args, **how): raise urllib.error.URLError('no network')
    monkeypatch.setattr(urllib.request, 'urlopen', no_network)
    with pytest.raises(ConnectionError, match=f"root='{tmp_path}' .*no network.*put the folder {put}"):
        read(tmp_path, download=True)
    with pytest.raises(ValueError, match=f'put the folder {put}.* or use download=True'): read(tmp_path)

def test_download_that_breaks_off(tmp_path, monkeypatch):
    "A connection that ends early leaves no file."
    class Short(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.send_header('Content-Length', '1000'); self.end_headers()
            self.wfile.write(b'x'*100)
        def log_message(self, *args): pass
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Short) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ConnectionError, match='could not be downloaded'):
            download(f'http://127.0.0.1:{server.server_port}/x', tmp_path/'x')
        server.shutdown()
    assert not list(tmp_path.iterdir())

def test_download_then_extract_then_read(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path/'set.zip', 'w') as z:
        for i in range(8): z.writestr(f'full/ukbench{i:05}.jpg', encoded(draw(seed=i)))
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    quiet = type('Quiet', (http.server.SimpleHTTPRequestHandler,), dict(log_message=lambda *a: None))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sha256 = hashlib.sha256((tmp_path/'set.zip').read_bytes()).hexdigest()
        path = download(f'http://127.0.0.1:{server.server_port}/set.zip', tmp_path/'down/set.zip', sha256)
        server.shutdown()
    assert ukbench(extract(path, tmp_path/'ukb'), incomplete=True).groups.tolist() == [0]*4 + [1]*4
