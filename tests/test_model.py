"Models and hostile surroundings: downloads, files that hold code, damaged files, a killed process, a full disk."
import functools, hashlib, http.server, os, pickle, random, signal, subprocess, sys, threading, time
from pathlib import Path

import pytest, torch, torchvision
from torch import nn
from multigrain import model as M
from multigrain.model import MultiGrain, load, load_published, save
from multigrain.trunks import SMALL, make_trunk, measure_trunk, seeded

ROOT = Path(__file__).resolve().parent.parent
IMAGES = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))

@pytest.fixture
def server(tmp_path, monkeypatch):
    "A folder served on this machine, standing in for every address; the cache of downloads is empty."
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args): pass
    (tmp_path/'www').mkdir()
    serving = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Quiet, directory=tmp_path/'www'))
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    for k in ('http_proxy', 'HTTP_PROXY', 'all_proxy', 'ALL_PROXY'): monkeypatch.delenv(k, raising=False)
    monkeypatch.setenv('TORCH_HOME', str(tmp_path/'cache'))
    real = torch.hub.download_url_to_file
    def download(url, *args): return real(f'http://127.0.0.1:{serving.server_port}/{url.rsplit("/", 1)[1]}', *args)
    monkeypatch.setattr(torch.hub, 'download_url_to_file', download)
    yield tmp_path/'www', serving
    serving.shutdown(); serving.server_close()

def publish(folder, name, content, monkeypatch):
    "Put weights behind the address of a torchvision network, with their hash in the file's name, as PyTorch does."
    file = folder/'part'
    torch.save(content, file)
    source = torchvision.models.get_model_weights(name).IMAGENET1K_V1
    to = f'{name}-{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}.pth'
    file.rename(folder/to)
    monkeypatch.setattr(type(source), 'url', property(lambda self: f'https://elsewhere/{to}'))
    return folder/to

def test_download_once_then_offline(server, monkeypatch):
    folder, serving = server
    with seeded(7): net = torchvision.models.resnet18(weights=None).eval()
    publish(folder, 'resnet18', net.state_dict(), monkeypatch)
    first = MultiGrain('resnet18', p=1., pretrained=True).eval()
    torch.testing.assert_close(first(IMAGES).logits, net(IMAGES))
    serving.shutdown(); serving.server_close()
    again = MultiGrain('resnet18', p=1., n_classes=10, pretrained=True)
    assert torch.equal(again.trunk.conv1.weight, net.conv1.weight) and again.classifier.out_features == 10

def test_damaged_download_leaves_nothing(server, tmp_path, monkeypatch):
    file = publish(server[0], 'resnet18', dict(a=torch.ones(999)), monkeypatch)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="trunk='resnet18' arrived damaged"): MultiGrain('resnet18', pretrained=True)
    assert not [o for o in (tmp_path/'cache').rglob('*') if o.is_file()]

def test_download_that_is_not_there(server, tmp_path, monkeypatch):
    publish(server[0], 'resnet18', {}, monkeypatch).unlink()
    said = (r"trunk='resnet18' cannot be downloaded from https://elsewhere/resnet18-\w+.pth \(HTTP Error 404"
            '.*put it at .*cache/hub/checkpoints')
    with pytest.raises(ConnectionError, match=said): MultiGrain('resnet18', pretrained=True)

def test_densenet_files_are_older_than_the_code(server, monkeypatch):
    import re
    with seeded(7): net = torchvision.models.densenet121(weights=None).eval()
    def old(key): return re.sub(r'(denselayer\d+\.(?:norm|conv))([12])', r'\1.\2', key)
    publish(server[0], 'densenet121', {old(k): v for k, v in net.state_dict().items()}, monkeypatch)
    model = MultiGrain('densenet121', p=1., pretrained=True).eval()
    with torch.no_grad(): torch.testing.assert_close(model(IMAGES).logits, net(IMAGES), rtol=1e-4, atol=1e-4)

class Bomb:
    "Unpickled, it makes a file."
    def __init__(self, file): self.file = file
    def __reduce__(self): return open, (self.file, 'w')

@pytest.mark.parametrize('zipped', [True, False])
def test_no_code_is_run(server, tmp_path, monkeypatch, zipped):
    bomb, path = Bomb(str(tmp_path/'boom')), tmp_path/'net.pth'
    for content in (dict(model_state=dict(a=bomb)), bomb):
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(ValueError, match='could run code'): load_published(path)
    path.write_bytes(pickle.dumps(bomb, protocol=2))
    with pytest.raises(ValueError): load_published(path)
    publish(server[0], 'resnet18', dict(a=bomb), monkeypatch)
    with pytest.raises(ValueError, match='not a file of weights'): MultiGrain('resnet18', pretrained=True)
    (tmp_path/'model').mkdir(); path.rename(tmp_path/'model'/'model.safetensors')
    with pytest.raises(ValueError, match='not a safetensors file'): load(tmp_path/'model')
    assert not (tmp_path/'boom').exists()

def test_files_of_another_kind(tmp_path):
    path = tmp_path/'net.pth'
    for content in (b'', b'\x1f\x8b\x08 a gzip', b'# a text', b'PK\x03\x04 half a zip', os.urandom(5000)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match='truncated or damaged|holds no model'): load_published(path)
    with pytest.raises(FileNotFoundError, match='is not a file'): load_published(tmp_path)

def test_every_damaged_byte_is_noticed(tmp_path):
    save(MultiGrain(nn.Conv2d(3, 2, 3, 2), n_classes=2), tmp_path)
    file, rng = tmp_path/'model.safetensors', random.Random(0)
    data = file.read_bytes()
    for i in range(len(data)):
        damaged = bytearray(data); damaged[i] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        try: M._read(file)
        except ValueError: continue
        raise AssertionError(f'byte {i} of {len(data)}: {data[max(0, i-20):i+20]}')
    for n in range(0, len(data), 7):
        file.write_bytes(data[:n])
        with pytest.raises(ValueError, match='truncated or damaged'): load(tmp_path)

def test_killed_while_saving(tmp_path):
    "Whenever it is killed, one of the two models is there as a whole."
    code = f'''
import torch
from multigrain.model import MultiGrain, save
models = [MultiGrain("mini", n_classes=n) for n in (3, 5)]
save(models[0], {str(tmp_path)!r}); print("ready", flush=True)
while True:
    for model in models: save(model, {str(tmp_path)!r})
'''
    run = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, cwd=ROOT)
    assert run.stdout.readline() == b'ready\n'
    made = {n: MultiGrain('mini', n_classes=n).state_dict() for n in (3, 5)}
    seen = set()
    for _ in range(30):  # and all the time before
        time.sleep(.02)
        now = load(tmp_path)
        assert all(torch.equal(v, made[now.n_classes][k]) for k, v in now.state_dict().items())
        seen.add(now.n_classes)
    run.send_signal(signal.SIGKILL); run.wait(); run.stdout.close()
    assert load(tmp_path).n_classes in (3, 5) and seen == {3, 5}

def test_full_disk(tmp_path):
    "A limit on the size of files stands in for a disk without room."
    resource = pytest.importorskip('resource')
    save(MultiGrain('mini', n_classes=3), tmp_path)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, usual[1]))
    try:
        said = r'model.safetensors \(File too large\): what it held before is intact'
        with pytest.raises(OSError, match=said): save(MultiGrain('mini', n_classes=5), tmp_path)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert load(tmp_path).n_classes == 3 and {o.name for o in tmp_path.iterdir()} == {'model.safetensors', 'model.json'}

def test_trunk_of_the_user():
    for wrong, say in ((nn.Identity, 'give a name, see trunk_names'), (None, 'trunk is a NoneType'),
                       (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveMaxPool2d(1)), 'in proportion'),
                       (nn.Conv2d(1, 4, 3), 'fails on an image'), (nn.Embedding(3, 3), 'fails on an image'),
                       (torchvision.models.resnet18(weights=None), r'shape \(1, 1000\)')):
        with pytest.raises((ValueError, TypeError), match=say): MultiGrain(wrong)
    trunk, state = nn.Conv2d(3, 4, 3, 2), torch.get_rng_state()
    assert MultiGrain(trunk, n_classes=2).stride == 2 and torch.equal(torch.get_rng_state(), state)

def test_channels_last_and_double_survive_saving(tmp_path):
    model = MultiGrain('mini', n_classes=3).eval().to(memory_format=torch.channels_last)
    save(model, tmp_path)
    torch.testing.assert_close(load(tmp_path)(IMAGES).logits, model(IMAGES).logits)
    save(model.double(), tmp_path)
    again = load(tmp_path)
    assert again.classifier.weight.dtype == torch.float64
    torch.testing.assert_close(again(IMAGES.double()).logits, model(IMAGES.double()).logits)

# channels, stride, map at 32 pixels, parameters: what runs and studies were made with
TRUNKS = dict(mini=(128, 8, 4, 302_864), small=(192, 8, 4, 528_528), small8=(96, 4, 8, 217_680))

@pytest.mark.parametrize('name', TRUNKS)
def test_small_trunks(name):
    channels, stride, side, parameters = TRUNKS[name]
    trunk = make_trunk(name).module.eval()
    assert list(TRUNKS) == list(SMALL) and measure_trunk(trunk) == (channels, stride)
    assert trunk(torch.zeros(1, 3, 32, 32)).shape == (1, channels, side, side)
    assert sum(o.numel() for o in trunk.parameters()) == parameters

def test_file_format_does_not_change(tmp_path):
    "Keys and description of a saved model, by value: files of older versions must be read, and the other way round."
    save(MultiGrain(nn.Conv2d(3, 2, 3, 2), p=float('inf'), n_classes=2, mean=(.5,)*3, std=(.25,)*3), tmp_path)
    assert (tmp_path/'model.json').read_text() == (
        '{"format": 1,\n "trunk": "custom",\n "p": "inf",\n "learn_p": false,\n "n_classes": 2,\n'
        ' "mean": [0.5, 0.5, 0.5],\n "std": [0.25, 0.25, 0.25],\n "whitening": null}\n')
    keys = MultiGrain('mini', n_classes=3, learn_p=True).state_dict().keys()
    assert [k for k in keys if not k.startswith('trunk.')] == ['pool.raw_p', 'classifier.weight', 'classifier.bias']
    assert {'trunk.0.weight', 'trunk.3.a.0.weight', 'trunk.5.skip.1.running_var'} <= keys
