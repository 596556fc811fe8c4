"""Who is confined gets nowhere else: what `make app` serves, and every function that opens a file, with paths that
lead out."""
import html, io, json, os, re, shutil, signal, subprocess, sys, time, urllib.error, urllib.request
from datetime import datetime
from pathlib import Path

import numpy as np, pytest, torch
from PIL import Image

from multigrain.basics import read_json
from multigrain.catalog import open_model
from multigrain.datasets import open_picture
from multigrain.explore_heatmaps import explore as explore_heatmaps
from multigrain.explore_search import Explorer as Search, collect, open_extractor, thumbnail
from multigrain.image import load_image, read_header
from multigrain.model import MultiGrain, load, load_published, save
from multigrain.panels import save_figure
from multigrain.search import Index, list_candidates
from multigrain.sets import content_hash, file_stamp, list_images

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SECRET = b'root:x:0:0:very secret'

@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "Two folders with the same in them, of which one will be open; and links from that to the other."
    place = tmp_path_factory.mktemp('confine')
    net = MultiGrain('mini', n_classes=3).eval()
    noise = np.random.default_rng(0).integers(0, 256, (9, 60, 80, 3), np.uint8)
    for side in ('open', 'closed'):
        (place/side/'photos').mkdir(parents=True)
        for i, o in enumerate(noise): Image.fromarray(o).save(place/side/'photos'/f'{side}{i}.png')
        (place/side/'text.png').write_bytes(SECRET)
        save(net, place/side/'net')
        state = dict(net.state_dict()) | {'pool.p': torch.tensor([3.])}
        torch.save(dict(model_state=state), place/side/'net.pth')
        Index.build(place/side/'photos', net, place/side/'index', s=56, progress=False)
        (place/side/'record.json').write_text('{"a": 1}')
        shutil.copytree(place/side/'net', place/side/'store'/'run-1'/'model')
        about = dict(parameters=dict(resolution=56, data='world'), complete=True, started='')
        (place/side/'store'/'run-1'/'run.json').write_text(json.dumps(about))
    links = place/'open'/'links'
    links.mkdir()
    for o in sorted((place/'closed').iterdir()): (links/o.name).symlink_to(o)
    shutil.copytree(place/'open'/'net', links/'half'); (links/'half'/'model.safetensors').unlink()
    (links/'half'/'model.safetensors').symlink_to(place/'closed'/'net'/'model.safetensors')
    shutil.copytree(place/'open'/'index', links/'half index')
    vectors, = (links/'half index').glob('*/embeddings.npy')
    real, = (place/'closed'/'index').glob('*/embeddings.npy')
    vectors.unlink(); vectors.symlink_to(real)
    (links/'shot.png').symlink_to(place/'closed'/'photos'/'closed0.png')
    return place

@pytest.fixture
def confined(place, monkeypatch):
    monkeypatch.setenv('MULTIGRAIN_ONLY', str(place/'open'))
    return place

def ways_to(place, name):
    "Paths that lead to something in the closed folder."
    return [place/'closed'/name, place/'open'/'..'/'closed'/name, place/'open'/'links'/name,
            os.path.relpath(place/'closed'/name), f'{place}//open/./links/../links/{name}']

def open_index(o): return Index.open(o)
def candidates(o):
    images = list_candidates(o).open([0])
    if not len(images): raise ValueError(str(images.bad))
DOORS = [(load_image, 'photos/{}0.png'), (read_header, 'photos/{}0.png'), (content_hash, 'photos/{}0.png'),
         (open_picture, 'photos/{}0.png'), (list_images, 'photos'), (candidates, 'photos'), (load, 'net'),
         (load_published, 'net.pth'), (open_model, 'net'), (open_index, 'index'), (read_json, 'record.json')]

def refusal(f, path):
    "What somebody hears who may not open something, without the path that is theirs; '' if it opens."
    try: f(str(path))
    except (OSError, ValueError, TypeError) as e:
        heard = f'{type(e).__name__}: {e}'.replace(os.path.abspath(path), 'PATH').replace(str(path), 'PATH')
        return re.sub(r'did you mean .*?\?', '', heard.replace(Path(path).name, 'NAME'))
    return ''

@pytest.mark.parametrize('door,name', DOORS, ids=[o.__name__ for o, _ in DOORS])
def test_doors(confined, door, name):
    inside = refusal(door, confined/'open'/name.format('open'))
    assert not inside or door is load_published and 'does not fit' in inside # it was read
    for path in ways_to(confined, name.format('closed')):
        heard = refusal(door, path)
        assert heard and 'secret' not in heard, path
        if 'closed' in str(path): assert heard == refusal(door, str(path).replace('closed', 'nowhere')) # there or not

def test_names_of_what_lies_outside_are_not_listed(confined):
    found = list_images(confined/'open')
    assert not [o for o in (*found.names, *found.folders) if 'closed' in o]
    assert len([o for o in found.names if o.startswith('photos/')]) == 9
    with pytest.raises(ValueError, match='No such file|cannot be opened'):
        load_image(confined/'open'/'links'/'shot.png')
    assert file_stamp(confined/'open'/'links'/'shot.png') == (-1, 0)

def test_links_inside_of_models_and_indexes(confined):
    with pytest.raises((OSError, ValueError), match='does not exist'): load(confined/'open'/'links'/'half')
    with pytest.raises(ValueError, match='missing'): Index.open(confined/'open'/'links'/'half index')

def test_not_a_byte(confined):
    "A text that is called an image: no byte of it, no advice to remove it."
    with pytest.raises(ValueError) as e: load_image(confined/'open'/'text.png')
    assert str(e.value) == f'{confined}/open/text.png is not an image of a known format'

def test_writing(confined):
    import matplotlib.pyplot as plt
    fig = plt.figure(figsize=(1, 1))
    assert save_figure(fig, confined/'open'/'a.png').exists()
    for o in ('closed/a.png', 'open/../closed/a.png', 'open/links/photos/a.png'):
        with pytest.raises(OSError): save_figure(fig, confined/o)
    assert not list(confined.glob('closed/**/a.png'))
    plt.close(fig)

def test_runs_are_offered_where_they_may_be_opened(confined):
    assert open_model('run-1', root=confined/'open'/'store').s == 56
    for name, root in (('run-1', 'closed/store'), ('../../closed/store/run-1', 'open/store'),
                       ('run-1', 'open/links/store')):
        with pytest.raises(ValueError, match='neither a folder'): open_model(name, root=confined/root)

def test_nothing_is_downloaded(confined, monkeypatch, tmp_path):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    monkeypatch.setattr(torch.hub, 'download_url_to_file', lambda *o: pytest.fail('a download'))
    with pytest.raises(ValueError, match='downloads nothing'): open_model('trunk:resnet18')

def clean(text):
    return re.sub('<[^>]*>', '', text)

def check_uploads(e, monkeypatch):
    "A file that is refused is named as its owner calls it, and nothing tells where it would lie."
    def hear(name, content):
        file = dict(name=name, content=memoryview(content), type='', size=len(content), last_modified=datetime.now())
        e.w.upload.value = (file,); e.wait()
        heard = html.unescape(clean(e.w.message.value))
        assert str(e.folder) not in heard and os.sep not in heard and 'secret' not in heard, heard
        return heard
    assert hear('../my text.png', SECRET) == 'my text.png is not an image of a known format'
    assert hear('nothing.jpg', b'') == 'nothing.jpg is empty'
    noise = np.random.default_rng(1).integers(0, 256, (60, 80, 3), np.uint8)
    Image.fromarray(noise).save(data := io.BytesIO(), 'PNG')
    assert 'cut short' in hear('half.png', data.getvalue()[:5000])
    assert not list((e.folder/'uploads').glob('*')) # what is refused is not kept
    monkeypatch.setattr('multigrain.widgets.KERNEL_BYTES', 1.5*len(data.getvalue()))
    assert hear('one.png', data.getvalue()) == ''
    assert 'all uploads of a page have at most 0 MB together' in hear('two.png', data.getvalue())
    assert len(list((e.folder/'uploads').glob('*'))) == 1

def test_heatmap_explorer(confined, monkeypatch):
    "Everything that a browser can write into a control."
    e = explore_heatmaps(root=confined/'open'/'store').wait()
    assert clean(e.w.message.value) == '' and not str(e.folder).startswith(str(ROOT))
    def hear(control, value):
        control.value = str(value); e.wait()
        return clean(e.w.message.value).replace(str(value), 'PATH')
    outside = ('/etc/passwd', '/etc/nothing', '~/.bashrc', '/root', *ways_to(confined, 'photos/closed0.png')[:3],
               confined/'open'/'links'/'shot.png')
    sentences = {re.sub("'[^']*'", 'X', hear(e.w.path, o)) for o in outside}
    assert len({o.split('(did')[0] for o in sentences}) == 1, sentences
    assert hear(e.w.path, confined/'open'/'photos'/'open0.png') == ''
    outside = ('/etc/passwd', 'nothing', 'os:getcwd', 'antigravity:x', *ways_to(confined, 'net'),
               *ways_to(confined, 'net.pth'), 'trunk:resnet18',
               '../../closed/store/run-1', confined/'open'/'links'/'half')
    networks = {hear(e.w.other, o) for o in outside}
    assert len(networks) == 1 and 'cannot be opened here' in networks.pop()
    assert hear(e.w.other, confined/'open'/'net') == ''
    e.w.s.max = 10**6
    assert 's*=100000 must be at most' in hear_number(e, 100_000)
    assert hear_number(e, 224) == ''
    check_uploads(e, monkeypatch)

def hear_number(e, s):
    e.w.s.value = s; e.wait()
    return clean(e.w.message.value)

def test_search_explorer(confined, monkeypatch):
    net = str(confined/'open'/'net')
    e = Search(confined/'open'/'photos', model=net, s=56, root=confined/'open'/'store').begin().wait()
    assert clean(e.w.message.value) == ''
    def hear(control, value):
        control.value = str(value); e.wait()
        heard = clean(e.w.message.value).replace(str(value), 'PATH')
        e.w.folder.value = str(confined/'open'/'photos'); e.wait()
        return heard
    folders = {hear(e.w.path, o) for o in ('/etc', '/nothing', '/root', *ways_to(confined, 'photos'))}
    assert len(folders) == 1 and 'is not a folder' in folders.pop()
    assert hear(e.w.path, confined/'open'/'net') != ''
    outside = '/etc/passwd', '/nothing', *ways_to(confined, 'photos/closed0.png')
    queries = {hear(e.w.query, o).split('(did')[0] for o in outside}
    assert len(queries) == 1, queries
    grey = thumbnail('/nothing.png')
    assert thumbnail(confined/'closed'/'photos'/'closed0.png') == grey == thumbnail(confined/'open'/'links'/'shot.png')
    mini = open_extractor(net, 56)
    found = collect(mini, confined/'open')
    assert not [o for o in found.paths if 'links' in o and 'shot' in o]
    assert {Path(o).name for o in found.skipped} >= {'shot.png', 'text.png'}
    assert all('secret' not in o and "b'" not in o for o in found.skipped.values())
    e.w.query.value = 'open0.png'; e.wait()
    check_uploads(e, monkeypatch)

# The app as `make app` starts it, without a browser: HTTP and websocket.

def app_command(**options):
    make = ['make', '--no-print-directory', '-n', 'app', *(f'{k}={v}' for k, v in options.items())]
    recipe = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return next(o for o in recipe.replace('\\\n', ' ').splitlines() if ' voila nbs/explore' in o)

def environment(home, **more):
    own = dict(JUPYTER_CONFIG_DIR='config', JUPYTER_RUNTIME_DIR='runtime', IPYTHONDIR='ipython', TMPDIR='tmp')
    for o in own.values(): (home/o).mkdir(exist_ok=True)
    path = f'{BIN}{os.pathsep}{os.environ["PATH"]}'
    env = os.environ | {k: str(home/v) for k, v in own.items()} | dict(PATH=path, OMP_NUM_THREADS='1')
    return env | dict(PYTHONPATH=str(ROOT)) | more

@pytest.mark.parametrize('options,words', [
    (dict(ADDRESS='0.0.0.0', TOKEN='0'), 'can be reached by other machines'),
    (dict(ROOT='/not/there'), 'ROOT=/not/there is not a folder')])
def test_app_refuses_to_start(tmp_path, options, words):
    done = subprocess.run(['sh', '-c', app_command(PORT=1, **options)], cwd=ROOT, env=environment(tmp_path), text=True,
                          capture_output=True, timeout=60)
    assert done.returncode and words in done.stdout + done.stderr

class Visitor:
    "Somebody with the token, and a websocket in place of a page."
    def __init__(self, port, token):
        from tornado.httpclient import HTTPRequest
        from tornado.ioloop import IOLoop
        from tornado.websocket import websocket_connect
        self.run = IOLoop(make_current=False).run_sync
        page = urllib.request.urlopen(f'http://127.0.0.1:{port}/voila/render/heatmaps.ipynb?token={token}', timeout=120)
        kernel = re.search(r'"kernelId": "([\w-]+)"', page.read().decode())[1]
        address = f'ws://127.0.0.1:{port}/api/kernels/{kernel}/channels'
        self.refused = lambda: self.run(lambda: websocket_connect(address))
        request = HTTPRequest(f'{address}?token={token}')
        self.socket = self.run(lambda: websocket_connect(request, max_message_size=10**8))

    def send(self, kind, content, channel='shell', version='2.1.0'):
        header = dict(msg_id=os.urandom(8).hex(), msg_type=kind, username='', session='visitor', version='5.3', date='')
        message = dict(header=header, parent_header={}, metadata=dict(version=version), content=content,
                       channel=channel)
        self.run(lambda: self.socket.write_message(json.dumps(message, default=str)))

    def receive(self, seconds=20):
        from tornado import gen
        try: message = self.run(lambda: gen.with_timeout(time.time() + seconds, self.socket.read_message()))
        except gen.TimeoutError: return None
        if isinstance(message, bytes): # numbers of bytes, JSON, pictures
            n = int.from_bytes(message[:4], 'big')
            ends = [int.from_bytes(message[4*i:4*i+4], 'big') for i in range(1, n + 1)] + [len(message)]
            message = message[ends[0]:ends[1]]
        return json.loads(message)

    def states(self):
        "All widgets, as the kernel has them."
        comm = os.urandom(8).hex()
        self.send('comm_open', dict(comm_id=comm, target_name='jupyter.widget.control', data={}), version='1.0.0')
        self.send('comm_msg', dict(comm_id=comm, data=dict(method='request_states')))
        while (message := self.receive()) is not None:
            data = message['content'].get('data', {})
            if message['content'].get('comm_id') == comm and 'states' in data:
                return {k: o['state'] for k, o in data['states'].items()}
        raise AssertionError('no answer')

    def widget(self, name):
        "Key and state of a control."
        found = [(k, o) for k, o in self.states().items() if f'mg-{name}' in o.get('_dom_classes', ())]
        return found[0]

    def set(self, name, **state):
        data = dict(method='update', state=state, buffer_paths=[])
        self.send('comm_msg', dict(comm_id=self.widget(name)[0], data=data))

    def heard(self, words, seconds=120):
        "The message of the explorer, once it has these words in it."
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            text = clean(self.widget('message')[1]['value'])
            if words in text: return text
            time.sleep(.3)
        raise AssertionError(f'{words!r} was not said, but {text!r}')

def status(url, method='GET'):
    request = urllib.request.Request(url, b'{}' if method == 'POST' else None, method=method)
    try: return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as e: return e.code

@pytest.mark.slow
def test_app(place, tmp_path):
    from test_browser import PATIENCE, free_port, until
    port, token = free_port(), os.urandom(8).hex()
    command = app_command(PORT=port, ROOT=place/'open', KERNELS=1)
    server = subprocess.Popen(['sh', '-c', command], cwd=ROOT, env=environment(tmp_path, JUPYTER_TOKEN=token),
                              stdout=open(tmp_path/'log', 'w'), stderr=subprocess.STDOUT, start_new_session=True)
    url = f'http://127.0.0.1:{port}'
    def there():
        try: return urllib.request.urlopen(url, timeout=5).read().decode()
        except OSError: return None
    try:
        first = until(there, 'the app', 60)
        assert 'password' in first and 'render/' not in first # without the token: a page to enter it
        assert 'voila/render/heatmaps.ipynb' in urllib.request.urlopen(f'{url}?token={token}').read().decode()
        ways = ('voila/files/heatmaps.ipynb', 'voila/files/../../README.md', 'voila/files/..%2f..%2fREADME.md',
                'voila/files//etc/passwd', 'voila/api/contents/..', 'voila/api/contents/..%2f..', 'api/contents',
                'api/kernels', 'api/sessions', 'api/terminals', 'files/README.md')
        for o, key in [(o, key) for o in ways for key in ('', f'?token={token}')]: # the token opens none of them
            assert status(f'{url}/{o}{key}') in (403, 404), (o, key)
            assert status(f'{url}/{o}{key}', 'POST') in (403, 404, 405), (o, key)
        contents = f'{url}/voila/api/contents/'
        assert status(contents) == 403 and status(f'{contents}?token={token}', 'POST') in (403, 404, 405)
        listed = json.load(urllib.request.urlopen(f'{contents}?token={token}')) # what the first page lists
        assert [o['path'] for o in listed['content']] == ['heatmaps.ipynb', 'search.ipynb']
        assert all(o['content'] is None for o in listed['content']) and listed['path'] == ''
        one = Visitor(port, token)
        with pytest.raises(Exception, match='403'): one.refused()
        assert status(f'{url}/voila/render/search.ipynb?token={token}') == 503 # one kernel is enough here

        made = tmp_path/'made'
        code = dict(code=f'open({str(made)!r}, "w")', silent=False, store_history=False, user_expressions={},
                    allow_stdin=False)
        for channel in ('shell', 'control'): one.send('execute_request', code, channel)
        evaluate = dict(seq=1, type='request', command='evaluate', arguments=dict(expression=code['code']))
        one.send('debug_request', evaluate, 'control')
        one.send('comm_open', dict(comm_id='x', target_name='os.system', data={}))

        one.set('path', value='/etc/passwd')
        assert 'is neither a file nor one of the pictures at hand' in one.heard('/etc/passwd')
        for path in (place/'closed'/'photos'/'closed0.png', place/'open'/'links'/'shot.png', place/'nowhere.png'):
            one.set('path', value=str(path))
            assert 'neither a file nor' in one.heard(str(path))
        one.set('other', value=str(place/'closed'/'net'))
        one.heard('cannot be opened here')
        one.set('image', _options_labels=['/etc/passwd'], index=0) # a list has no other value than its own
        assert not made.exists()
        assert len(list((tmp_path/'tmp').glob('multigrain-app-*/kernel-*'))) == 1
        text = (tmp_path/'log').read_text()
        assert text.count('execute_request') >= 1 and 'not allowed' in text
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try: server.wait(20*PATIENCE)
        except subprocess.TimeoutExpired: os.killpg(server.pid, signal.SIGKILL)
    def gone(): return not list((tmp_path/'tmp').glob('multigrain-app-*'))
    until(gone, 'the end of uploads with the app', 30) # the shell may end before the server
