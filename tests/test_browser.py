"""The explorers in a real browser: JupyterLab on a random port with a token, Chromium, keyboard and uploads.

A test for another notebook of nbs/explore takes the fixture `lab` and calls `lab.open(name)`:
it gets a page on which all cells have run."""
import json, os, re, shutil, signal, socket, statistics, subprocess, sys, time, urllib.request
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np, pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
OUT = ROOT/'out'
ARGS = ('--no-sandbox --disable-gpu --disable-background-networking --disable-component-update '
        '--disable-sync --no-first-run').split()
BIG = dict(width=1500, height=1500) # pixels of a page
pytestmark = [pytest.mark.browser, pytest.mark.slow]
SETTINGS = {'@jupyterlab/apputils-extension:notification': {'fetchNews': 'false', 'checkForUpdates': False}, # no popup
            '@jupyterlab/notebook-extension:tracker': {'windowingMode': 'none'}} # cells out of sight stay on the page

def missing():
    "Why there can be no browser here; '' if there can."
    if find_spec('playwright') is None: return 'the package playwright is not installed: pip install playwright'
    return '' if chromium() else 'there is no Chromium: apt-get install chromium, or set CHROMIUM to its path'

def chromium():
    "The path of a browser, or None."
    names = 'chromium', 'chromium-browser', 'google-chrome'
    return os.environ.get('CHROMIUM') or next(filter(None, map(shutil.which, names)), None)

def free_port():
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); return s.getsockname()[1]

def until(f, what, seconds=90):
    "The first true value of f()."
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := f(): return value
        time.sleep(.2)
    raise AssertionError(f'{what} did not happen in {seconds} s')

class Server:
    "A server of its own on copies of the explorers, and a browser."
    def __init__(self, home, browser):
        self.home, self.browser, self.port, self.token = home, browser, free_port(), os.urandom(16).hex()
        if not (home/'settings.ini').exists():
            no_copies = shutil.ignore_patterns('.ipynb_checkpoints')
            shutil.copytree(ROOT/'nbs'/'explore', home/'nbs'/'explore', ignore=no_copies)
            shutil.copy(ROOT/'settings.ini', home) # so that runs, data and out are those of this folder

    def start(self, *command, **env):
        own = dict(JUPYTER_CONFIG_DIR='config', JUPYTER_RUNTIME_DIR='runtime', IPYTHONDIR='ipython')
        env = os.environ | {k: str(self.home/v) for k, v in own.items()} | env
        env |= dict(OMP_NUM_THREADS='1', OMP_WAIT_POLICY='PASSIVE')
        self.log = self.home/f'{type(self).__name__}.log'
        self.server = subprocess.Popen(command, cwd=self.home, env=env, stdout=open(self.log, 'w'),
                                       stderr=subprocess.STDOUT, start_new_session=True)

    def close(self):
        os.killpg(self.server.pid, signal.SIGTERM)
        try: self.server.wait(20)
        except subprocess.TimeoutExpired: os.killpg(self.server.pid, signal.SIGKILL); self.server.wait()

class Lab(Server):
    "JupyterLab."
    def __init__(self, home, browser):
        super().__init__(home, browser)
        for name in ('settings', 'user', 'workspaces'): (home/name).mkdir(exist_ok=True)
        (home/'settings'/'overrides.json').write_text(json.dumps(SETTINGS))
        self.start(BIN/'jupyter', 'lab', '--no-browser', '--allow-root', '--ip=127.0.0.1', f'--port={self.port}',
                   '--ServerApp.port_retries=0', f'--IdentityProvider.token={self.token}',
                   f'--ServerApp.root_dir={home}', f'--LabApp.app_settings_dir={home/"settings"}',
                   f'--LabApp.user_settings_dir={home/"user"}', f'--LabApp.workspaces_dir={home/"workspaces"}')
        until(lambda: self.get('api/status'), 'JupyterLab', 60)

    def get(self, path):
        "JSON from the server, or None."
        url = f'http://127.0.0.1:{self.port}/{path}?token={self.token}'
        try: return json.load(urllib.request.urlopen(url, timeout=5))
        except OSError: return None

    def ready(self, name):
        "Has the notebook a kernel that is idle and connected? The toolbar says idle before there is one."
        return any(name in path and state == 'idle' and connections > 0 for path, state, connections in self.kernels())

    def kernels(self):
        "Path of the notebook, state and number of connections of every kernel."
        return [(o['path'], o['kernel']['execution_state'], o['kernel']['connections'])
                for o in self.get('api/sessions') or []]

    def open(self, name):
        "A page with all cells of nbs/explore/<name>.ipynb run."
        page = self.browser.new_page(viewport=BIG)
        tree = f'lab/workspaces/{name}/tree' # a workspace of its own: no tab of another test
        page.goto(f'http://127.0.0.1:{self.port}/{tree}/nbs/explore/{name}.ipynb?token={self.token}')
        page.wait_for_selector('.jp-Notebook .jp-Cell', timeout=60_000)
        until(lambda: self.ready(name), 'an idle and connected kernel')
        page.locator('.lm-MenuBar-itemLabel', has_text='Run').first.click()
        page.locator('.lm-Menu-itemLabel', has_text='Run All Cells').first.click()
        def prompts(): return page.locator('.jp-CodeCell .jp-InputArea-prompt').all_inner_texts()
        def done(): return no_error(page) or all(re.fullmatch(r'\[\d+\]:', o.strip()) for o in prompts())
        try: until(done, 'the end of all cells', 240)
        except AssertionError as e:
            screenshot(page, f'{name}_failed')
            raise AssertionError(f'{e}; cells {prompts()}, kernels {self.kernels()}') from e
        return page # until then the kernel would answer late: it runs one thing at a time

class App(Server):
    "What `make app` serves."
    def __init__(self, home, browser):
        super().__init__(home, browser)
        make = ['make', '--no-print-directory', '-n', 'app', f'PORT={self.port}']
        recipe = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        lines = recipe.replace('\\\n', ' ').splitlines()
        voila = next(o for o in lines if o.strip().startswith('voila '))
        self.start('sh', '-c', voila, PATH=f'{BIN}{os.pathsep}{os.environ["PATH"]}')
        until(lambda: self.read(''), 'the app', 60)

    def read(self, path):
        try: return urllib.request.urlopen(f'http://127.0.0.1:{self.port}/{path}', timeout=5).read().decode()
        except OSError: return None

    def open(self, name):
        page = self.browser.new_page(viewport=BIG)
        page.goto(f'http://127.0.0.1:{self.port}/voila/render/{name}.ipynb', timeout=120_000)
        return page

@pytest.fixture(scope='module')
def browser():
    if reason := missing():
        if os.environ.get('CI_REQUIRE_BROWSER') == '1': pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium(), args=ARGS)
        try: yield browser
        finally: browser.close()

@pytest.fixture(scope='module')
def home(tmp_path_factory):
    "Both servers work in it: what the one has drawn and indexed, the other finds."
    return tmp_path_factory.mktemp('lab')

@pytest.fixture(scope='module')
def lab(home, browser):
    lab = Lab(home, browser)
    try: yield lab
    finally: lab.close()

@pytest.fixture(scope='module')
def app(home, browser):
    app = App(home, browser)
    try: yield app
    finally: app.close()

def digest(page, css):
    "A hash of the bytes of a picture on the page."
    return page.evaluate('''async css => {
        const bytes = await (await fetch(document.querySelector(css).src)).arrayBuffer();
        return [...new Uint8Array(bytes)].reduce((h, b) => (h*31 + b) >>> 0, bytes.byteLength) }''', css)

@contextmanager
def changes(page, css):
    "Inside, the picture becomes another one."
    before = digest(page, css)
    yield
    until(lambda: digest(page, css) != before, f'a new picture in {css}', 60)

def wait_text(page, css, *words, seconds=60):
    until(lambda: all(o in page.inner_text(css) for o in words), f'{words} in {css}', seconds)

def no_error(page):
    "No cell and no widget shows an error."
    bad = ', '.join(f'[data-mime-type="application/vnd.jupyter.{o}"]' for o in ('error', 'stderr'))
    assert page.locator(bad).all_inner_texts() == []
    assert 'Error displaying widget' not in page.inner_text('body')

def key_to_picture(page, handle, img, key, n=21):
    "Milliseconds from a key press to the new picture, for each of n presses."
    page.evaluate('''img => { window.mg = {}; const o = document.querySelector(img);
        document.addEventListener('keydown', () => window.mg.down = performance.now(), true);
        o.addEventListener('load', () => window.mg.load = performance.now()) }''', img)
    times = []
    for _ in range(n):
        page.evaluate('window.mg.load = null')
        page.locator(handle).press(key)
        page.wait_for_function('window.mg.load !== null', timeout=10_000)
        times.append(page.evaluate('window.mg.load - window.mg.down'))
        page.wait_for_timeout(60) # one event at a time
    return times

def record(name, times):
    "Milliseconds for people, in out/browser.json."
    numbers = dict(key_to_picture_ms=round(statistics.median(times)), slowest_ms=round(max(times)),
                   presses=len(times))
    OUT.mkdir(exist_ok=True)
    file = OUT/'browser.json'
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | {name: numbers}, indent=1))

def screenshot(page, name):
    (OUT/'screenshots').mkdir(parents=True, exist_ok=True)
    page.screenshot(path=OUT/'screenshots'/f'{name}.png')

def silent(page):
    "Is there nothing to say?"
    return page.inner_text('.mg-message').strip() == ''

def test_heatmaps(lab, tmp_path):
    page = lab.open('heatmaps')
    page.wait_for_selector('img.mg-picture', timeout=90_000)
    wait_text(page, '.mg-numbers', 'p* = 3', 'logit', 'passes of the trunk so far: 1')
    assert silent(page)

    handle = '.mg-p .noUi-handle'
    with changes(page, 'img.mg-picture'): page.locator(handle).press('ArrowRight')
    wait_text(page, '.mg-numbers', 'p* = 3.05')
    times = key_to_picture(page, handle, 'img.mg-picture', 'ArrowRight')
    wait_text(page, '.mg-numbers', f'p* = {3.05 + .05*len(times):.4g}', 'so far: 1') # every press, no pass
    record('heatmaps', times)
    assert statistics.median(times) < 500, times # some 60 ms on a quiet machine; tests run beside each other

    name = page.locator('.mg-label input')
    with changes(page, 'img.mg-picture'): name.fill('Windsor tie'); name.press('Enter')
    wait_text(page, '.mg-numbers', 'Windsor tie: logit', 'so far: 1')
    name.fill('Windsor'); name.press('Enter') # half a name is not sent
    wait_text(page, '.mg-numbers', 'Windsor tie: logit')
    name.fill('Windsor tie'); name.press('Enter')
    with changes(page, 'img.mg-picture'): page.locator('.mg-channel select').select_option(index=2)
    wait_text(page, '.mg-numbers', 'so far: 1')

    with changes(page, 'img.mg-picture'): page.locator('.mg-s .noUi-handle').press('ArrowRight')
    wait_text(page, '.mg-numbers', 's* = 228', 'so far: 2')
    with changes(page, 'img.mg-picture'): page.locator('.mg-shape button', has_text='rectangle').click()
    for _ in range(8): page.locator('.mg-s .noUi-handle').press('PageUp') # each supersedes the one before
    def last(): return f"s* = {page.inner_text('.mg-s .widget-readout').strip()}"
    until(lambda: silent(page) and last() in page.inner_text('.mg-numbers'), 'the last resolution')
    screenshot(page, 'heatmaps')

    with changes(page, 'img.mg-picture'): page.locator('.mg-against select').select_option('another p*')
    assert page.locator('.mg-p2').is_visible() and not page.locator('.mg-s2').is_visible()
    screenshot(page, 'heatmaps_compare')
    with changes(page, 'img.mg-picture'): page.locator('.mg-against select').select_option('nothing')

    y, x = np.mgrid[:180, :240]
    file = tmp_path/'my picture.png'
    Image.fromarray(np.stack([x, y, (x*y) % 256], 2).astype(np.uint8)).save(file)
    with changes(page, 'img.mg-picture'):
        with page.expect_file_chooser() as chooser: page.locator('.mg-upload').click()
        chooser.value.set_files(file)
    images = page.locator('.mg-image select')
    until(lambda: (images.input_value() or '').endswith('my picture.png'), 'the upload in the list')
    path = page.locator('.mg-path input')
    path.fill('/not/there.jpg'); path.press('Enter')
    wait_text(page, '.mg-message', '/not/there.jpg', 'neither a file nor')
    images.select_option('grace_hopper.jpg')
    until(lambda: silent(page), 'no message any more')

    page.locator('.mg-copy').click()
    until(lambda: 'figure(Scene(' in page.locator('.mg-code textarea').input_value(), 'the code')
    page.locator('.mg-png').click()
    wait_text(page, '.mg-message', 'saved as')
    assert list((lab.home/'out').glob('heatmap-*.png')) and len(list((lab.home/'out'/'uploads').iterdir())) == 1
    no_error(page)
    page.close()

def face(page, css):
    "What a picture that can be clicked shows: its words and a hash of its bytes."
    return page.evaluate("""async css => {
        const o = document.querySelector(css), url = getComputedStyle(o).backgroundImage.slice(5, -2);
        const bytes = new Uint8Array(await (await fetch(url)).arrayBuffer());
        return [o.innerText, bytes.reduce((h, b) => (h*31 + b) >>> 0, bytes.length)] }""", css)

def faces(page, group, n=6): return [face(page, f'.mg-{group}:nth-child({i + 1})') for i in range(n)]

def query_of(page): return Path(page.locator('.mg-query input').input_value()).name

def quiet(page): return silent(page) and not page.locator('.mg-bar').is_visible()

def answer(page):
    "The number of the answer that is shown, 0 before the first."
    found = page.locator('.mg-numbers').count() and re.search(r'answer (\d+) took', page.inner_text('.mg-numbers'))
    return int(found[1]) if found else 0

def ask(page, act, what):
    "Do something to the search explorer, and wait for the next answer."
    before = answer(page)
    act()
    until(lambda: quiet(page) and answer(page) > before, what, 60)

def test_search(lab, tmp_path):
    page = lab.open('search')
    page.wait_for_selector('.mg-thumb', timeout=90_000, state='attached')
    until(lambda: quiet(page) and answer(page), 'the first answers')
    assert len(list((lab.home/'data'/'gallery'/'images').iterdir())) > 170 # drawn when it was first needed
    n = len(list((lab.home/'data'/'gallery'/'images').iterdir()))
    wait_text(page, '.mg-numbers', f'{n} images', 'p* = 1,', 'not whitened', 'measured on 200')

    page.locator('.mg-query input').fill(str(lab.home/'data'/'gallery'/'images'/'fish1-view1.jpg'))
    ask(page, lambda: page.locator('.mg-query input').press('Enter'), 'answers to a path')
    first = faces(page, 'instance')
    assert all(re.match(r'[01]\.\d{3}', words) for words, _ in first) # similarities
    assert len({picture for _, picture in first}) == 6
    similarities = [float(words[:5]) for words, _ in first]
    assert similarities == sorted(similarities, reverse=True)
    threshold = float(re.search(r'similarity above (\d\.\d+)', page.inner_text('.mg-about_copy'))[1])
    copies = page.locator('.mg-copy:visible').all_inner_texts()
    assert copies and all(float(o[:5]) > threshold for o in copies)
    assert page.locator('.mg-instance.mg-above').count() == sum(o > threshold for o in similarities)
    assert 'fish1-' in page.locator('.mg-instance').nth(0).get_attribute('title') # the same object
    wait_text(page, '.mg-about_class', 'images of class', 'probability')
    screenshot(page, 'search')

    handle = '.mg-p .noUi-handle' # by keyboard
    def passes(): return int(re.search(r'so far: (\d+)', page.inner_text('.mg-numbers'))[1])
    before = passes()
    with changes(page, 'img.mg-picture'):
        ask(page, lambda: page.locator(handle).press('ArrowRight'), 'another exponent')
    wait_text(page, '.mg-numbers', 'p* = 1.5')
    assert [words for words, _ in faces(page, 'instance')] != [words for words, _ in first]
    ask(page, lambda: page.locator(handle).press('ArrowLeft'), 'the exponent of before')
    assert faces(page, 'instance') == first and passes() <= before + 2 # nobody looked at the folder again
    key_to_picture(page, handle, 'img.mg-picture', 'ArrowRight', 5) # each exponent for the first time
    until(lambda: quiet(page), 'peace')
    times = key_to_picture(page, handle, 'img.mg-picture', 'ArrowLeft', 5)
    record('search', times)
    def back(): return 'p* = 1,' in page.inner_text('.mg-numbers') and faces(page, 'instance') == first
    until(lambda: quiet(page) and back(), 'where we were')

    ask(page, lambda: page.locator('.mg-whiten input').press('Space'), 'whitening')
    wait_text(page, '.mg-numbers', ', whitened', 'measured on 100')
    white = faces(page, 'instance')
    assert white != first
    ask(page, lambda: page.locator('.mg-k .noUi-handle').press('ArrowRight'), 'seven results')
    assert page.locator('.mg-instance:visible').count() == 7
    assert faces(page, 'instance') == white
    ask(page, lambda: page.locator('.mg-whiten input').press('Space'), 'no whitening')

    second = Path(page.locator('.mg-instance').nth(1).get_attribute('title')).name
    with changes(page, 'img.mg-asked'):
        ask(page, lambda: page.locator('.mg-instance').nth(1).click(), 'a result as the query')
    assert query_of(page) == second
    page.locator('.mg-click button', has_text='compares').click()
    with changes(page, 'img.mg-picture'): page.locator('.mg-instance').nth(3).click()
    assert query_of(page) == second
    third = page.locator('.mg-browse').nth(2)
    before = third.get_attribute('title')
    page.locator('.mg-page .noUi-handle').press('ArrowRight')
    page.locator('.mg-click button', has_text='asks').click()
    wanted = until(lambda: (o := third.get_attribute('title')) != before and o, 'the second page')
    with changes(page, 'img.mg-asked'): ask(page, third.click, 'an image of the folder as the query')
    assert query_of(page) == Path(wanted).name

    file = tmp_path/'my fish.png' # a mirror image that is not in the folder
    fish = Image.open(lab.home/'data'/'gallery'/'images'/'fish1-view1.jpg')
    fish.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(file)
    with changes(page, 'img.mg-asked'):
        with page.expect_file_chooser() as chooser: page.locator('.mg-upload').click()
        ask(page, lambda: chooser.value.set_files(file), 'answers to an upload')
    assert query_of(page).endswith('-my fish.png')
    assert page.locator('.mg-instance').nth(0).get_attribute('title').endswith('fish1-view1.jpg')
    screenshot(page, 'search_upload')

    bad = tmp_path/'text.png'; bad.write_text('no image')
    with page.expect_file_chooser() as chooser: page.locator('.mg-upload').click()
    chooser.value.set_files(bad)
    wait_text(page, '.mg-message', 'is not an image')
    page.locator('.mg-path input').fill('/not/there'); page.locator('.mg-path input').press('Enter')
    wait_text(page, '.mg-message', '/not/there', 'not a folder')
    page.locator('.mg-folder select').select_option(index=0)
    until(lambda: quiet(page), 'no message any more')

    mine = tmp_path/'mine' # a folder of one's own, without unrelated images
    mine.mkdir()
    for o in sorted((lab.home/'data'/'gallery'/'images').glob('lamp*')): shutil.copy(o, mine)
    page.locator('.mg-path input').fill(str(mine))
    ask(page, lambda: page.locator('.mg-path input').press('Enter'), 'another folder')
    wait_text(page, '.mg-numbers', f'{len(list(mine.iterdir()))} images')
    wait_text(page, '.mg-about_copy', 'there is no threshold')
    no_error(page)
    page.close()

def test_app(app):
    listing = app.read('')
    assert 'heatmaps.ipynb' in listing and 'search.ipynb' in listing # to choose from
    page = app.open('search')
    until(lambda: answer(page) and quiet(page), 'answers in the app', 120)
    with changes(page, 'img.mg-asked'):
        ask(page, lambda: page.locator('.mg-browse').nth(3).click(), 'a click in the app')
    ask(page, lambda: page.locator('.mg-p .noUi-handle').press('ArrowRight'), 'another exponent in the app')
    wait_text(page, '.mg-numbers', 'p* = 1.5')
    assert page.locator('.jp-CodeMirrorEditor, .cm-editor, .jp-InputArea-editor').count() == 0 # no code
    screenshot(page, 'app_search')
    no_error(page)
    page.close()

    page = app.open('heatmaps')
    def there(): return page.locator('.mg-numbers').count() and 'p* = 3' in page.inner_text('.mg-numbers')
    until(there, 'a heatmap in the app', 120)
    with changes(page, 'img.mg-picture'): page.locator('.mg-p .noUi-handle').press('ArrowRight')
    wait_text(page, '.mg-numbers', 'p* = 3.05')
    assert silent(page)
    screenshot(page, 'app_heatmaps')
    no_error(page)
    page.close()
