# Sourced by ./dev: wheels for other machines. README.md says what is in them, and why.
made=$root/build/wheel
bin=$made/tools/bin
source=$made/source
libraries=$made/libraries
target=x86_64-linux-gnu.2.28
platform=manylinux_2_28_x86_64

# make_wheels PYTHON...: into dist/, one for each interpreter; without any, for that of .venv.
make_wheels() {
  local python
  [ "$(uname -m)" = x86_64 ] || fail "strata: wheels are made on x86_64"
  [ $# -gt 0 ] || set -- "$(readlink -f "$venv/bin/python")"
  for python in "$@"; do
    "$python" -c 'import sys, venv; assert (3, 11) <= sys.version_info[:2] <= (3, 14)' 2>/dev/null ||
      fail "strata: $python is no Python 3.11 to 3.14 that can make environments"
  done
  install_compiler
  export ZIG_GLOBAL_CACHE_DIR=$made/cache ZIG_LOCAL_CACHE_DIR=$made/cache
  export CC=$bin/zig-cc AR=$bin/zig-ar PKG_CONFIG_LIBDIR=$libraries
  [ -e "$libraries/complete" ] || take_libraries
  take_source
  rm -rf "$made/cuda"
  ! present nvcc || make_cuda_library
  for python in "$@"; do make_wheel "$python"; done
}

# The compiler and its archiver, as programs of one word each.
install_compiler() {
  local zig word
  over_venv "$made/tools" $(grep -v '^#' "$root/packaging/requirements.txt")
  zig=$("$bin/python" -c 'import ziglang; print(ziglang.__path__[0])')/zig
  for word in "cc -target $target" "c++ -target $target" ar ranlib; do
    printf '#!/bin/sh\nexec "%s" %s "$@"\n' "$zig" "$word" >"$bin/zig-${word%% *}"
    chmod +x "$bin/zig-${word%% *}"
  done
  cat >"$made/zig.ini" <<END
[binaries]
c = '$bin/zig-cc'
cpp = '$bin/zig-c++'
ar = '$bin/zig-ar'
ranlib = '$bin/zig-ranlib'
[built-in options]
cpp_args = ['-isystem$libraries', '-idirafter$made/headers']
cpp_link_args = ['-L$libraries', '-s']
END
}

# What is linked: liburing and libaio as the distribution has them, which ask little of the C
# library; xxHash from its sources, for the distribution's archive has no run-time choice of vector
# instructions.
take_libraries() {
  local name
  rm -rf "$libraries" && mkdir -p "$libraries/xxhash"
  cp -r /usr/include/{liburing,liburing.h,libaio.h} "$libraries"
  cp "$(g++ -print-file-name=liburing.a)" "$libraries"
  cp "$(g++ -print-file-name=libaio.so)" "$libraries/libaio.so.1"
  ln -s libaio.so.1 "$libraries/libaio.so"
  phase "fetching xxHash's sources" fetch_source xxhash "$libraries/xxhash"
  phase "compiling xxHash" compile_xxhash
  for name in liburing libxxhash; do
    sed -E "s#^(libdir|includedir)=.*#\1=$libraries#" \
      "$(env -u PKG_CONFIG_LIBDIR pkg-config --variable=pcfiledir $name)/$name.pc" \
      >"$libraries/$name.pc"
  done
  touch "$libraries/complete"
}

compile_xxhash() (
  cd "$libraries/xxhash" &&
    tar -xf ./*.orig.tar.* --strip-components=1 &&
    "$CC" -O3 -fPIC -c xxhash.c && "$CC" -O3 -fPIC -c xxh_x86dispatch.c &&
    "$AR" rcs ../libxxhash.a xxhash.o xxh_x86dispatch.o &&
    cp ./*.h LICENSE ..
)

# The sources as they are now, without what was compiled among them, and the licences of others.
take_source() {
  rm -rf "$source" && mkdir -p "$source/subprojects"
  (cd "$root" && git ls-files -z --cached --others --exclude-standard | xargs -0 tar -c) |
    tar -x -C "$source"
  ln -s "$root/subprojects/packagecache" "$source/subprojects/packagecache"
  licences >"$source/LICENSE-third-party.txt"
}

# Of all that is compiled or linked into a wheel.
licences() {
  local documents=/usr/share/doc site
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "Parts of this wheel that are not strata's. Linked into the module:"
  title jemalloc
  tar -xOf "$root"/subprojects/packagecache/jemalloc-* --wildcards '*/COPYING'
  title pybind11
  cat "$site"/pybind11-*/licenses/LICENSE
  title xxHash
  cat "$libraries/LICENSE"
  title "liburing (under its MIT licence)"
  cat $documents/liburing-dev/copyright
  title "libaio (a library of its own, in strata.libs; its source: Debian's package libaio)"
  cat $documents/libaio-dev/copyright /usr/share/common-licenses/LGPL-2.1
  title "LLVM's C++ library"
  echo "Apache-2.0 WITH LLVM-exception: https://llvm.org/LICENSE.txt"
  title "NVIDIA's CUDA runtime (where libstrata_cuda.so is)"
  echo "CUDA Toolkit EULA: https://docs.nvidia.com/cuda/eula"
}

title() { printf '\n\n==== %s\n\n' "$1"; }

# The library for GPUs is the same for every Python.
make_cuda_library() {
  phase "configuring the library for NVIDIA GPUs" "$venv/bin/meson" setup "$made/cuda" "$source" \
    --native-file "$made/zig.ini" --buildtype release -Dcuda=enabled
  phase "compiling it" ninja -C "$made/cuda" bindings/libstrata_cuda.so
}

# make_wheel PYTHON
make_wheel() {
  local python=$1 name env options cuda=-Dcuda=disabled
  name=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  # Debian's Python has a part of its headers where a compiler for other machines does not look.
  rm -rf "$made/headers" && mkdir -p "$made/headers/x86_64-linux-gnu"
  ln -s "/usr/include/x86_64-linux-gnu/$name" "$made/headers/x86_64-linux-gnu/$name"
  env=$made/$name
  options="--native-file=$made/zig.ini"
  [ ! -e "$made/cuda/bindings/libstrata_cuda.so" ] ||
    cuda=-Dgpu_library=$made/cuda/bindings/libstrata_cuda.so
  phase "making an environment with $name" "$python" -m venv --clear "$env"
  # Older pips take one --config-settings of a name.
  phase "installing what builds" "$env/bin/python" -m pip install 'pip>=23.1' \
    $(grep -E '^(meson|ninja|pybind11)==' "$root/requirements.txt") \
    $(grep '^meson-python==' "$root/packaging/requirements.txt")
  rm -rf "$made/raw"
  PATH=$env/bin:$PATH phase "compiling strata for $name" "$env/bin/python" -m pip wheel "$source" \
    --no-build-isolation --no-deps -w "$made/raw" \
    -Csetup-args="$options" -Csetup-args="$cuda"
  # Takes libaio along, and refuses what asks for a newer C library.
  PATH=$bin:$PATH LD_LIBRARY_PATH=$libraries phase "checking the wheel" "$bin/python" -m auditwheel \
    repair --plat "$platform" --only-plat -w "$root/dist" "$made"/raw/*.whl
  newest_wheel
}

newest_wheel() { ls -t "$root"/dist/*.whl | head -n 1; }

# A wheel trains as the tree does, where no compiler, header or module of the tree can be found.
try_wheel() {
  local env=$made/fresh site="import sysconfig; print(sysconfig.get_path('purelib'))"
  make_wheels
  phase "making an environment for the wheel" "$venv/bin/python" -m venv --clear "$env"
  "$venv/bin/python" -c "$site" >"$("$env/bin/python" -c "$site")/venv.pth" # for torch
  phase "installing the wheel" "$env/bin/python" -m pip install --no-deps "$(newest_wheel)"
  [ "$(cd "$env"/lib/python*/site-packages/strata.libs && ls | sed 's/-.*//')" = libaio ] ||
    fail "strata: the wheel has other libraries beside it than libaio"
  (cd "$made" && env -i PATH="$env/bin" python "$root/packaging/train.py") >"$made/wheel.txt"
  python "$root/packaging/train.py" >"$made/tree.txt"
  grep -F "strata: $env/" "$made/wheel.txt"
  diff <(grep -v ^strata: "$made/tree.txt") <(grep -v ^strata: "$made/wheel.txt")
}
