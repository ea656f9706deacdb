"""`latentserve serve`: flags, settings file and their mistakes."""

from __future__ import annotations

import logging
import sys
import types
import warnings

import pytest

from workers.config import DEMO_MODEL


@pytest.fixture
def started(monkeypatch):
    """Settings `deploy.serve.app.start` was called with."""
    calls = []
    app = types.ModuleType("deploy.serve.app")
    app.StartFailed = type("StartFailed", (RuntimeError,), {})

    def start(config, say):
        say("starting")
        calls.append(config)
        if config.port == 1:
            raise app.StartFailed("port 1 is taken")

    app.start = start
    monkeypatch.setitem(sys.modules, "deploy.serve.app", app)
    return calls


@pytest.fixture
def gpus(monkeypatch):
    """Set the number of GPUs of this machine."""
    return lambda count: monkeypatch.setattr("workers.environment.visible_gpus", lambda: count)


@pytest.mark.parametrize(
    ("count", "flags", "ranks"),
    [(1, (), 1), (1, ("--device", "cpu"), 2), (1, ("--tensor-parallel", "3"), 3), (2, (), 2), (8, (), 2)],
)
def test_demo_takes_no_more_gpus_than_there_are(started, command, gpus, count, flags, ranks):
    gpus(count)
    assert command("serve", *flags).code == 0
    assert started[0].engine.tensor_parallel == ranks


def test_demo_by_default_on_two_ranks(started, command, gpus):
    gpus(0)
    assert command("serve").code == 0
    (config,) = started
    assert (config.engine.model, config.engine.tensor_parallel, config.replicas, config.port) == ("demo", 2, 1, 8000)


def test_a_start_that_fails(started, command):
    ran = command("serve", "--port", "1")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "starting\nerror: port 1 is taken\n"


def test_another_model_runs_on_one_rank(started, command, model_folder):
    command("serve", "--model", model_folder)
    assert started[0].engine.tensor_parallel == 1


def test_flags(started, command, model_folder):
    flags = (
        f"--model {model_folder} --tensor-parallel 4 --width 2 --dtype bfloat16 --device cpu --max-rows 8 "
        f"--kv-cache-dtype fp8 --drafter eagle3 --draft-model {model_folder} "
        "--token-budget 99 --max-context 100 --cache-pages 12 --memory-fraction 0.5 --replicas 2 --host 0.0.0.0 "
        "--port 0 --ingress proxy --ray-address auto --served-model-name tiny "
        "--served-model-name small --api-key one --api-key two --activations bf16 --mixed-step-target-ms 12.5"
    )
    assert command("serve", *flags.split()).code == 0
    (config,) = started
    engine = config.engine
    assert (engine.tensor_parallel, engine.width, engine.dtype, engine.device) == (4, 2, "bfloat16", "cpu")
    assert (engine.kv_cache_dtype, engine.drafter, engine.draft_model) == ("fp8", "eagle3", model_folder)
    assert (engine.max_rows, engine.token_budget, engine.max_context, engine.cache_pages) == (8, 99, 100, 12)
    assert engine.memory_fraction == 0.5
    assert engine.activations == "bf16"
    assert engine.mixed_step_target_ms == 12.5
    assert (config.replicas, config.host, config.port, config.ingress) == (2, "0.0.0.0", 0, "proxy")
    assert (config.ray_address, config.model_name) == ("auto", "tiny")
    assert config.api.served_model_names == ("tiny", "small")
    assert config.api.api_keys == ("one", "two")


@pytest.mark.parametrize("quiet", [True, False])
def test_a_quiet_start_says_nothing(command, monkeypatch, quiet):
    heard: list[str] = []

    def start(config, say):
        say("serving")
        log = logging.getLogger("a.library")
        heard.extend(name for name in ("WARNING", "ERROR") if log.isEnabledFor(getattr(logging, name)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("an old name", FutureWarning, stacklevel=1)
        heard.extend(str(warning.message) for warning in caught)

    monkeypatch.setattr("deploy.serve.app.start", start)
    ran = command("serve", *(["-q"] if quiet else []))
    assert (ran.code, ran.out, ran.err) == (0, "", "" if quiet else "serving\n")
    assert heard == (["ERROR"] if quiet else ["WARNING", "ERROR", "an old name"])
    assert logging.getLogger().isEnabledFor(logging.WARNING)  # it holds for the command alone


def test_the_model_may_stand_alone(started, command, model_folder):
    for args in ((model_folder,), (model_folder, "--model", model_folder), ("--port", "9000", model_folder)):
        assert command("serve", *args).code == 0
        assert started[-1].engine.model == model_folder
    ran = command("serve", model_folder, "--model", "demo")
    assert (ran.code, len(started)) == (2, 3)
    assert "--model demo" in ran.err


@pytest.mark.parametrize("name", ["serve", "generate", "fit", "selftest", "bench latency"])
def test_every_command_with_a_model_takes_it_alone(command, name, tmp_path):
    missing = str(tmp_path / "none")
    prompt = ("--prompt-ids", "1") if name == "generate" else ()
    ran = command(*name.split(), missing, *prompt)
    assert ran.code == 2
    assert "is not a model folder" in ran.err.replace("\n", " ")
    ran = command(*name.split(), missing, "--model", "demo", *prompt)
    assert (ran.code, "give one of them" in " ".join(ran.err.replace("│", " ").split())) == (2, True)


def test_a_draft_model_that_is_not_there_is_missed_at_once(started, command, model_folder, tmp_path):
    ran = command("serve", "--model", model_folder, "--draft-model", str(tmp_path / "none"))
    assert ran.code == 2
    assert "is not the folder of a draft model: it has neither config.json" in ran.err
    assert command("serve", "--model", model_folder, "--draft-model", model_folder, "--drafter", "mtp").code == 2
    assert not started


def test_keys_with_names_come_from_a_file(started, command, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("- {key: sesame, name: app, weight: 2}\n")
    assert command("serve", "--api-keys-file", str(file), "--api-key", "plain").code == 0
    plain, app = started[0].api.api_keys
    assert (plain, app.key, app.name, app.weight) == ("plain", "sesame", "app", 2.0)
    file.write_text("- {key: sesame, name: app, weight: many}\n")
    ran = command("serve", "--api-keys-file", str(file))
    assert ran.code == 2
    assert "weight: Input should be a valid number" in ran.err
    assert "sesame" not in ran.err
    assert "cannot read" in command("serve", "--api-keys-file", str(tmp_path / "none")).err


def test_flags_replace_the_file(started, command, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("engine: {model: demo, width: 4, max_rows: 7}\nport: 9000\nreplicas: 3\n")
    assert command("serve", "--config", str(file), "--width", "2", "--port", "9001").code == 0
    (config,) = started
    assert (config.engine.width, config.engine.max_rows, config.port, config.replicas) == (2, 7, 9001, 3)


def test_an_empty_file_is_no_settings(started, command, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("")
    assert command("serve", "--config", str(file)).code == 0
    assert started[0].engine.model == "demo"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("engine: [", "is not YAML"),
        ("- 1", "must hold settings by name"),
        ("engine: demo", "engine in"),
        ("ports: 1", "unknown setting ports in {file}, did you mean port?"),
        ("engine: {model: demo, widht: 2}", "unknown setting engine.widht in {file}, did you mean engine.width?"),
        ("engin: {model: demo}", "unknown setting engin in {file}, did you mean engine?"),
        ("width: 2", "unknown setting width in {file}, did you mean engine.width?"),
        ("frobnicate: 1", "unknown setting frobnicate in {file}; docs/command-line.md lists all there are"),
        ("1: 2", "1: Names should be text"),
        ("port: many", "port: Input should be a valid integer"),
        ("engine: {model: demo, token_budget: 3}", "is too small for max_rows"),
        ("api: {api_keys: sesame}", "Input should be a list"),
        ("api: {api_keys: ['']}", "api_keys must not hold an empty string"),
        ("health:", "health: Input should hold settings by name"),
        ("api: {chat_template: '{% for m in messages %}{{ m'}", "chat_template is not valid Jinja, line 1: "),
        (None, "cannot read"),
    ],
)
def test_mistakes_in_the_file(started, command, tmp_path, content, said):
    file = tmp_path / "serve.yaml"
    if content is not None:
        file.write_text(content)
    ran = command("serve", "--config", str(file))
    assert (ran.code, started) == (2, [])
    assert said.replace("{file}", str(file)) in ran.err
    assert "Traceback" not in ran.err


def test_a_mistake_is_named_as_the_user_wrote_it(started, command, tmp_path):
    """A mistake in the file is named by its setting, even one that a flag could set."""
    file = tmp_path / "serve.yaml"
    file.write_text("engine: {max_rows: abc}\nport: 70000\n")
    ran = command("serve", "--config", str(file), "--memory-fraction", "2")
    assert (ran.code, started) == (2, [])
    assert "engine.max_rows: Input should be a valid integer" in ran.err
    assert "--port" not in ran.err
    assert "--memory-fraction: Input should be less than or equal to 1" in ran.err


def test_a_section_without_settings_is_as_if_it_were_not_there(started, command, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("engine:\napi:\nport: 8001\n")
    assert command("serve", "--config", str(file)).code == 0
    assert (started[0].engine.model, started[0].port) == ("demo", 8001)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--model", "/no/such/folder"), "/no/such/folder is not a model folder"),
        (("--model", str(DEMO_MODEL / "config.json")), f"is a file, not a model folder: give its folder, {DEMO_MODEL}"),
        (("--dtype", "int3"), "--dtype: Input should be 'auto'"),
        (("--activations", "fp16"), "--activations: Input should be 'auto' or 'bf16'"),
        (("--kv-cache-dtype", "int8"), "--kv-cache-dtype: Input should be 'auto'"),
        (("--ingress", "none"), "--ingress: Input should be 'auto'"),
        (("--memory-fraction", "2"), "--memory-fraction: Input should be less than or equal to 1"),
        (("--port", "70000"), "--port"),
        (("--width", "9"), "--width"),
        (("--max-rows", "9999"), "--max-rows: Input should be less than or equal to 1024"),
    ],
)
def test_mistakes_in_flags(started, command, args, said):
    ran = command("serve", *args)
    assert (ran.code, started) == (2, [])
    assert said in ran.err
