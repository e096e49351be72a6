"""Secrets are hidden by name, place, form and randomness; what only looks a little like one stays."""

import time

import pytest

from ddpdoctor.recorder.storage.secrets import hide_in_text, hide_secrets

RANDOM = "q7Rk2LmZ9xVt4Bn8Wc1Ys6"
COMMIT = "1b866ed0c5f2a94d7e3b8f6a1c0d9e8f7a6b5c4d"
"""Has the form of an old key of W&B, too."""
HEX = "0123456789abcdef0123456789abcdef"
UUID = "550e8400-e29b-41d4-a716-446655440000"


@pytest.mark.parametrize(
    ("typed", "stored"),
    [
        ("train.py --api-key abc --lr 0.1", "train.py --api-key *** --lr 0.1"),
        ("train.py --wandb_token=abc --password=x", "train.py --wandb_token=*** --password=***"),
        ("train.py --hf_token abc", "train.py --hf_token ***"),
        ("train.py --hftoken abc", "train.py --hftoken ***"),
        ("train.py --hfToken abc", "train.py --hfToken ***"),
        ("train.py --wandb-key abc", "train.py --wandb-key ***"),
        ("train.py --wandbkey abc", "train.py --wandbkey ***"),
        ("train.py --db-pass hunter2", "train.py --db-pass ***"),
        ("train.py --openai_key=abc --neptune-key x1", "train.py --openai_key=*** --neptune-key ***"),
        ("train.py --auth u:p", "train.py --auth ***"),
        ("train.py -p hunter2", "train.py -p ***"),
        ("mysqldump -psecret -u root db", "mysqldump -p*** -u root db"),
        ("mysql -p secret db", "mysql -p *** db"),
        ("curl -u me:secret x", "curl -u me:*** x"),
        ("TOKEN=abc train.py", "TOKEN=*** train.py"),
        ("env WANDB_API_KEY=abc HF_TOKEN=x python t.py", "env WANDB_API_KEY=*** HF_TOKEN=*** python t.py"),
        ("srun --export=ALL,HF_TOKEN=abc t.py", "srun --export=ALL,HF_TOKEN=*** t.py"),
        ("t.py logger.api_key=abc +wandb.key=abc", "t.py logger.api_key=*** +wandb.key=***"),
        ("t.py --data s3://k:pw@host/x", "t.py --data s3://k:***@host/x"),
        ("t.py --db=postgres://u:p@w@h:5432/d", "t.py --db=postgres://u:***@h:5432/d"),
        ("t.py https://h/x?token=abc&n=3", "t.py https://h/x?token=***&n=3"),
        ("t.py --url=https://h/x?a=1&X-Amz-Signature=ab12", "t.py --url=https://h/x?a=1&X-Amz-Signature=***"),
        ("t.py --x hf_abcdefghijklmnopqrstuvwx", "t.py --x ***"),
        (f"t.py --x {RANDOM}", "t.py --x ***"),
        ("train.py --password --lr 1", "train.py --password --lr 1"),
    ],
)
def test_values_of_secrets_are_hidden(typed: str, stored: str) -> None:
    assert " ".join(hide_secrets(tuple(typed.split()))) == stored


@pytest.mark.parametrize(
    "typed",
    [
        "train.py",
        "train.py --tokenizer gpt2 --lr 0.1 --max-tokens=5 --token-budget 4096 --eos-token </s>",
        "train.py --pad_token_id=0 --pad-token [PAD] --use_auth_token True --lr 1",
        "train.py --model meta-llama/Llama-3-8B --revision " + COMMIT,
        "train.py --model Meta-Llama-3.1-8B-Instruct-Q4_K_M --name ViTBasePatch16Imagenet21kFinetuned",
        "train.py --sort-key name --image-key jpg --state-dict-key model --keyboard qwerty",
        "train.py --run-id 550e8400-e29b-41d4-a716-446655440000 --job 12345678.batch",
        "train.py --out /scratch/u1/runs/20260304-050607-gpt2small/version_12/checkpoints/epoch=3-step=1200.ckpt",
        "train.py --sha " + COMMIT + "00112233445566778899aabb",
        "train.py -p 29500 -p out/run1 -p bf16 -p 0.1 -p debug -p 16-mixed",
        "train.py --rdzv-endpoint=tcp://[::1]:29500 --rdzv-id run_2026 --master-addr host:29500",
        "train.py --passes 3 --authors me --sigma 0.1 --bypass 2 --secretary x",
        "git clone git@github.com:pytorch/pytorch.git https://user@host/x",
        "train.py --data s3://bucket/a/b?versions=3 optimizer.lr=0.1 +trainer.max_steps=5",
        "python -m torch.distributed.run --nproc-per-node=2 --master-port=29500 train.py",
        "train.py --key-file ~/.ssh/id_rsa --token-file /run/secrets/token",
    ],
)
def test_what_is_no_secret_stays(typed: str) -> None:
    assert " ".join(hide_secrets(tuple(typed.split()))) == typed


SHAPES = [
    "hf_abcdefghijklmnopqrstuvwxyz01234567", "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "github_pat_11ABCDEFG0abcdefghijkl_xyz",
    "sk-abcdefghijklmnopqrstuvwxyz012345", "sk-ant-api03-abcdefghijklmnopqrstuvwx-AA",
    "sk-proj-abcd1234efgh5678ijkl9012",
    "AKIAIOSFODNN7EXAMPLE", "xoxb-123456789012-abcdefABCDEF", "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "glpat-abcdefghijklmnop1234", "npm_abcdefghijklmnopqrstuvwxyz0123456789", "gsk_abcdefghijklmnopqrstuvwxyz",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "nvapi-abcdefghijklmnopqrstuvwxyz", "dapi0123456789abcdef0123456789abcdef", RANDOM,
]  # fmt: skip


@pytest.mark.parametrize("token", SHAPES)
def test_a_credential_is_known_by_its_form(token: str) -> None:
    assert hide_in_text(f"401 for {token}, try again") == "401 for ***, try again"


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("GET https://me:pw@h/x?token=abc failed", "GET https://me:***@h/x?token=*** failed"),
        ("Authorization: Bearer abc123def456", "Authorization: ***"),
        ("{'Authorization': 'Basic dXNlcjpwdw=='}", "{'Authorization': '***'}"),
        ("sent Bearer abcdef0123456789", "sent Bearer ***"),
        ("host=db user=me password=pw dbname=x", "host=db user=me password=*** dbname=x"),
        ('{"api_key": "abc", "lr": 1}', '{"api_key": "***", "lr": 1}'),
        (f"wandb: api_key={COMMIT}", "wandb: api_key=***"),
        (f"wandb login {COMMIT}", "wandb login ***"),
        ("Server=h;Pwd=x;Database=d", "Server=h;Pwd=***;Database=d"),
        ("posted to https://hooks.slack.com/services/T0/B0/abc", "posted to https://hooks.slack.com/services/***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
         "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----"),
        ("failed: mysql --password=abc --port 3306", "failed: mysql --password=*** --port 3306"),
        ("--hf-token abc123 --max-tokens 5", "--hf-token *** --max-tokens 5"),
        ("['t.py', '--wandb_key', '0123456789abcdef', '--lr', '0.1']", "['t.py', '--wandb_key', '***', '--lr', '0.1']"),
        ("t.py --password='a b' -x", "t.py --password='***' -x"),
        ("bad secret wJalrXUtnFEMI/K7MDENG/bPxRfiCYEX1", "bad secret ***"),
    ],
)  # fmt: skip
def test_secrets_in_a_text_are_hidden(text: str, stored: str) -> None:
    assert hide_in_text(text) == stored


@pytest.mark.parametrize(
    "text",
    [
        "boom",
        "Unexpected token: '}' at line 3",
        "expected scalar type Float but found Half, key: layers.0.weight",
        f"commit {COMMIT} is not an ancestor",
        "KeyError: 'model.layers.0.self_attn.q_proj.weight'",
        "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 1800000 ms",
        "Connection closed by peer [127.0.0.1]:29500",
        "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
        "frame #0: _ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        "c10::Error::Error(c10::SourceLocation, std::__cxx11::basic_string<char>) + 0x57 (0x7f3a1c2b4d87 in libc10.so)",
        "File /opt/conda/envs/py311/lib/python3.11/site-packages/torch/nn/modules/module.py, line 1501",
        "tokenizer.pad_token=<pad>, num_tokens=4096, basic training, sort_key=name",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ],
)
def test_a_plain_text_stays(text: str) -> None:
    assert hide_in_text(text) == text


WANDB = [
    f"wandb: Paste an API key from your profile and hit enter: {COMMIT}",
    f'wandb.login(key="{COMMIT}")', f"WANDB_API_KEY {COMMIT}", f"export WANDB_API_KEY={COMMIT}",
    f"wandb: ERROR invalid key {COMMIT} for api.wandb.ai", f"echo {COMMIT} | wandb login --relogin",
    f"machine api.wandb.ai login user password {COMMIT}", f"W&B key {COMMIT}", f"Weights & Biases: {COMMIT}",
    f"https://{COMMIT}@api.wandb.ai",
]  # fmt: skip
HOOKS = [
    f"https://acme.webhook.office.com/webhookb2/{UUID}@{UUID}/IncomingWebhook/{HEX}/{UUID}",
    f"https://outlook.office.com/webhook/{UUID}@{UUID}/IncomingWebhook/{HEX}/{UUID}",
    f"https://prod-12.westus.logic.azure.com:443/workflows/{HEX}/triggers/manual/paths/invoke?sp=%2Frun&sig=a{UUID}",
    f"https://default.aa.environment.api.powerplatform.com:443/powerautomate/automations/direct/workflows/{HEX}/x?y",
    f"https://discord.com/api/webhooks/1234/{HEX}", f"https://canary.discord.com/api/v10/webhooks/123/{HEX}_ghi",
    f"https://hooks.slack.com/triggers/T0/123/{HEX}", f"https://open.feishu.cn/open-apis/bot/v2/hook/{UUID}",
    f"https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key={UUID}", f"https://hc-ping.com/{UUID}",
    f"https://oapi.dingtalk.com/robot/send?access_token={HEX}", f"https://api.telegram.org/bot12345678:AA{HEX}/send",
    f"https://chat.googleapis.com/v1/spaces/A/messages?key={UUID}&token={HEX}",
]  # fmt: skip
ADDRESSES = [
    f"git clone https://{HEX}@github.com/x", f"https://{HEX}@o123.ingest.sentry.io/456",
    f"https://oauth2:{HEX}@gitlab.com/x.git", f"postgresql://u:{HEX}@h/db", f"redis://:{HEX}@h:6379/0",
    f"http_proxy=http://u:{HEX}@proxy:3128", f"https://s3/x?X-Amz-Algorithm=AWS4&X-Amz-Signature={HEX}",
    f"https://a.blob.core.windows.net/c?sv=1&sig={HEX}", f"https://storage.googleapis.com/x?X-Goog-Signature={HEX}",
    f"redirect=?token%3D{HEX}", f"AccountKey={HEX}==;EndpointSuffix=x",
]  # fmt: skip
ESCAPED = [
    f'body: {{\\"api_key\\": \\"{HEX}\\", \\"lr\\": 1}}', f'{{\\\\\\"password\\\\\\": \\\\\\"{HEX}\\\\\\"}}',
    f"{{\\'secret\\': \\'{HEX}\\'}}", f'cut off: {{"api_key": "{HEX}', f'"token":"{HEX}"',
]  # fmt: skip
NAMED = [
    f"PGPASSWORD={HEX} psql", f"passwd: {HEX}", f"curl -u me:{HEX} x", f"docker login -u me -p {HEX}",
    f"sshpass -p {HEX} ssh h", f"curl -H 'X-API-Key: {HEX}' x", f"Set-Cookie: sid={HEX}", f"API key: {HEX}",
    f"Incorrect API key provided: {HEX}",
    f"if password == '{HEX}':",
    f"secret={HEX}(x)", f"token=abc{HEX}&x", f"token '{HEX}' is invalid", f"authorization: bearer {HEX}",
    "sent Bearer abcdefghijklmnopqrstuvwxyz".replace("abcdefgh", HEX.replace("0", "a")),
]  # fmt: skip


@pytest.mark.parametrize("text", [*WANDB, *HOOKS, *ADDRESSES, *ESCAPED, *NAMED])
def test_what_lets_others_in_is_hidden(text: str) -> None:
    shown = hide_in_text(text)
    assert "***" in shown
    assert [part for part in (COMMIT, HEX, UUID) if part in shown] == []
    assert hide_in_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        f"wandb: git commit {COMMIT}", f"wandb: Tracking run with wandb version 0.17.0, sha {COMMIT}",
        f'"wandb": true, "commit": "{COMMIT}"', f"wandb @ git+https://github.com/wandb/wandb@{COMMIT}",
        "wandb: View run at https://wandb.ai/team/proj/runs/a1b2c3d4",
        f'File "/root/.cache/hub/models--x/snapshots/{COMMIT}/modeling.py", line 7', f"HEAD is now at {COMMIT} fix",
        f"sha256:{HEX}{HEX}", f"container {HEX}{HEX} exited", f"checkpoint {HEX}{HEX}.pt", f'etag: "{HEX}"',
        f"GPU-{UUID} MIG-{UUID}", f"run id {UUID}",
        "n3:4711:4720 [0] NCCL INFO ncclCommInitRank comm 0x55d0c8f0 rank 0 busId 1b000 commId 0x5c1d2e3f4a5b6c7d",
        "PWD=/home/me/train OLDPWD=/tmp", "AuthType=auth/munge AuthInfo=socket=/run/munge",
        "https://github.com/pytorch/pytorch/issues/12345", "ssh://git@github.com/x", "s3://bucket/a@2x.png",
        "token: 128000 is out of range", "KeyError: 'token'", "the token is invalid", "bad authorization header",
        "docker run -p 8080:80 nginx", "mysql running on port 3306", "def __init__(self, token=None, secret: str = '')",
        "signature = inspect.signature(forward)", 'if token.type == OP and token.string == "def":',
        "dict_keys(['model', 'optimizer'])", "See https://huggingface.co/settings/tokens", "hf_transfer is missing",
        "PG GUID 0(default_pg) Rank 1] NCCL_COMM_ID=10.0.0.1:1234 job_id=1234567_89 fsdp_auth_wrap=1 pass 3 of 5",
        "2026-01-02T03:04:05.678901Z model-00001-of-00004.safetensors events.out.tfevents.1700000000.host.123.0",
    ],
)  # fmt: skip
def test_numbers_and_words_of_a_job_stay(text: str) -> None:
    assert hide_in_text(text) == text


UNITS = (
    "a", "a=", "token=", "token=<", "://a:", "https://aaaa", "eyJ.", "eyJ-", "eyJaaaaaaaa-", "a.", "'", 'token="',
    '\\"', "sk-", "-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "-----BEGIN A", "x:y@", "sk-a-", "sk-abc-", "SG.",
    "SG.-", "xoxb-", "token ", "wandb ", f"wandb {COMMIT} ", "curl -", "docker login ", "bearer ", "--a", "--token ",
    "hooks.slack.com/services/", " ", "%3D", "password=\\\\\\", "hc-ping.com/",
)  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_time_grows_with_the_length_of_a_line_and_not_with_its_square(unit: str) -> None:
    """Twenty times the text takes about twenty times as long; with the square it would be four hundred times."""
    assert cpu_s(unit, 100_000) < 100 * max(cpu_s(unit, 5_000), 0.003)


def cpu_s(unit: str, length: int) -> float:
    text = unit * (length // len(unit))
    began = time.process_time()
    hide_secrets((f"{text}!=x",))
    return time.process_time() - began
