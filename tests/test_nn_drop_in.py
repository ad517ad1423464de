"""The example that replaces `nnx.MultiHeadAttention` by NSA runs, and both decoders learn."""

from examples import drop_in


def test_both_decoders_learn(capsys, monkeypatch):
    monkeypatch.setattr(drop_in, "STEPS", 8)

    drop_in.main([])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["DenseDecoder", "NSADecoder"]
    for line in lines:
        _, _, first, _, last, *_ = line.split()
        assert float(last) < float(first) - 0.3
