"Which number a class has: folders named by numbers, runs and indexes from before, networks near chance."
import json, warnings

import numpy as np, pytest, torch
from PIL import Image
from torch import nn
from multigrain.benchmark import score_benchmark
from multigrain.catalog import open_benchmark, open_model
from multigrain.launch import Machine, Place, train
from multigrain.model import MultiGrain
from multigrain.readers import image_folder
from multigrain.recipe import make_recipe
from multigrain.runs import Run
from multigrain.search import Index

COLOURS = np.random.default_rng(4).integers(20, 235, (12, 3))

@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    "Twelve classes of one colour each, in folders named 0 to 11."
    root = tmp_path_factory.mktemp('numbers')/'photos'
    for part in ('train', 'val'):
        for c, colour in enumerate(COLOURS):
            (root/part/str(c)).mkdir(parents=True)
            for i in range(3):
                noise = np.random.default_rng([c, i, part == 'val']).integers(-8, 9, (40, 48, 3))
                Image.fromarray((colour + noise).astype(np.uint8)).save(root/part/str(c)/f'{i}.png')
    return root

def oracle():
    "A network that knows the colours: a plain mean, and the nearest of them."
    net = MultiGrain(nn.AvgPool2d(8), p=1., n_classes=12, mean=(0.,)*3, std=(1.,)*3).eval()
    c = torch.tensor(COLOURS/255, dtype=torch.float32)
    with torch.no_grad():
        net.classifier.weight.copy_(2*c)
        net.classifier.bias.copy_(-c.square().sum(1))
    return net

def top1(net, images): return score_benchmark(net, 'val', images, 32, progress=False)[0].value

def test_numbers_are_read_as_numbers(photos):
    "A network that is right is scored as right; in the order of text it would look like a guess, and this is said."
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert top1(oracle(), image_folder(photos/'val')) == 100
    as_text = image_folder(photos/'val', classes=sorted(map(str, range(12))))
    with pytest.warns(UserWarning, match='near chance.*in another order than its outputs, they were read as 0, 1, 10'):
        assert top1(oracle(), as_text) == pytest.approx(100*2/12)  # 0 and 1 have kept their places

def test_train_and_val_are_no_classes(photos, tmp_path):
    "A folder with train and val has the classes that lie in them: as a set, and as an index."
    images = image_folder(photos)
    assert images.classes == list(map(str, range(12))) and np.bincount(images.labels).tolist() == [6]*12
    index = Index.build(photos, oracle(), tmp_path/'index', s=32, progress=False)
    assert sorted(index.labels, key=int) == images.classes and index.labelled

def older(run):
    "Make a run look like one from before the classes were listed."
    data = run.record['data']
    for o in data.values(): del o['class_names']
    run.note(data=data)

def test_a_run_from_before_keeps_its_order(photos, tmp_path, monkeypatch):
    "It was trained with folders sorted as text; evaluated today, it gets the same numbers as then."
    monkeypatch.setenv('MULTIGRAIN_RUNS', str(tmp_path))
    text = sorted(map(str, range(12)))
    recipe = make_recipe('smoke', data=str(photos), epochs=4, iterations=10, lam=1., m=1, p=1., batch_size=24)
    import multigrain.launch as launch
    with monkeypatch.context() as m: # as it was read then
        m.setattr(launch, 'read_sets', lambda r, place: launch.training_sets(r.data, r.bad, text))
        run = train(recipe, Place('older', out=tmp_path), Machine(progress=False))
    older(run)
    opened = open_model(run.folder.name)
    assert opened.classes == text
    val = open_benchmark('val', '', opened.data, classes=opened.classes)
    assert top1(opened.model, val) == pytest.approx(100*run.result['val_top1']) # as it was validated then
    assert top1(opened.model, val) > 50
    natural = open_benchmark('val', '', opened.data)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert top1(opened.model, natural) < top1(opened.model, val) - 20
    # and it goes on as it was begun: the images are the same
    run.note(complete=False)
    assert train(recipe, Place('older', out=tmp_path), Machine(progress=False)).complete
    assert 'class_names' not in Run(run.folder).record['data']['train']

def test_a_run_of_today_lists_its_classes(photos, tmp_path, monkeypatch):
    monkeypatch.setenv('MULTIGRAIN_RUNS', str(tmp_path))
    recipe = make_recipe('smoke', data=str(photos), epochs=1, iterations=1)
    run = train(recipe, Place(out=tmp_path), Machine(progress=False))
    assert open_model(run.folder.name).classes == list(map(str, range(12)))
    assert json.loads((run.folder/'run.json').read_text())['data']['val']['class_names'] == list(map(str, range(12)))
