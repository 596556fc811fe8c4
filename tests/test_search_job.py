"The job search, through papermill as people run it: page, table, a second folder, a second call that embeds nothing."
import csv, json, os, subprocess, sys
from pathlib import Path

import nbformat, numpy as np, pytest
from PIL import Image
from multigrain.model import MultiGrain, save

ROOT = Path(__file__).resolve().parent.parent

def draw(file, i, size=(64, 56)):
    "A synthetic picture."
    noise = np.random.default_rng(i).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(file)

@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "Thirty pictures, five of them twice and one that is none; a second folder with one of them; a network."
    place = tmp_path_factory.mktemp('search')
    for i in range(30): draw(place/'photos'/f'{i:02}.png', i)
    for i in range(5): draw(place/'photos'/'small'/f'{i:02}.png', i, (48, 42))
    (place/'photos'/'none.png').write_bytes(b'no image')
    for i in (7, 99): draw(place/'other'/f'{i:02}.jpg', i)
    save(MultiGrain('mini', n_classes=3), place/'model')
    return place

def job(place, *args, ok=True):
    "Run the job; what its cells printed, or what it said on stderr."
    out = place/'out.ipynb'
    command = [sys.executable, '-m', 'papermill', ROOT/'nbs'/'search.ipynb', out, '--no-progress-bar', *args]
    env = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1', MULTIGRAIN_RUNS=str(place/'runs'))
    done = subprocess.run(list(map(str, command)), cwd=place, capture_output=True, text=True, timeout=900, env=env)
    assert (done.returncode == 0) == ok, done.stderr[-3000:]
    if not ok: return done.stderr
    cells = [c for c in nbformat.read(out, 4).cells if c.cell_type == 'code']
    return ''.join(o.get('text', '') for c in cells for o in c.outputs)

def test_search(place):
    before = {o: o.stat().st_mtime_ns for o in place.glob('photos/**/*')}
    args = '-p', 'images', place/'photos', '-p', 'model', place/'model', '-p', 's', 64
    printed = job(place, *args, '-p', 'against', place/'other')
    assert '35 images, 1 left out' in printed and '5 groups of 10 images' in printed
    assert '1 of 2 images of the second folder' in printed
    folder, = (place/'runs'/'indexes').glob('photos-????????-report')
    rows = list(csv.DictReader((folder/'copies.csv').open()))
    assert list(rows[0]) == ['group', 'path', 'similarity', 'size', 'suggestion'] and len(rows) == 10
    for a, b in zip(rows[::2], rows[1::2]):
        assert a['group'] == b['group'] and Path(a['path']).name == Path(b['path']).name
        assert (a['suggestion'], a['size'], b['size']) == ('keep', '64x56', '48x42')
        assert b['suggestion'] == f'like {Path(a["path"]).name}' and .5 < float(b['similarity']) <= 1
    assert [Path(o['other']).name for o in csv.DictReader((folder/'in_both.csv').open())] == ['07.jpg']
    page = (folder/'copies.html').read_text()
    assert page.count('class="keep"') == 5 and 'In both folders' in page and 'Classes' in page
    # again, with one more file: nothing else is embedded
    draw(place/'photos'/'new.png', 20, (50, 44))
    assert '6 groups of 12 images' in job(place, *args)
    manifest = json.loads((folder.with_name(folder.name.removesuffix('-report'))/'manifest.json').read_text())
    assert (manifest['n'], manifest['next_id']) == (36, 36)
    assert all(o.stat().st_mtime_ns == t for o, t in before.items()) # nothing was deleted or changed

def test_wrong_parameters(place):
    assert 'did you mean images' in job(place, '-p', 'image', 'x', ok=False)
