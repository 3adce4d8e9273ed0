#!/bin/sh
# Configures and builds the static library beside this file, unless it is there.
set -eu
cd "$(dirname "$0")"
exec 9>build.lock
flock 9  # two build folders that are set up at once: one builds, the other waits
[ ! -f built ] || exit 0
# Thread-local storage that a module may bring along later, and no name that anybody else has; the
# rest leaves out what a heap inside given memory does not use.
EXTRA_CFLAGS=-g0 ./configure --disable-initial-exec-tls --with-jemalloc-prefix=strata_je_ \
  --without-export --disable-cxx --disable-cache-oblivious --disable-stats --disable-fill \
  --disable-libdl --disable-doc --enable-shared=no
# Names of its own for what is internal would take compiling everything twice. They are hidden in the
# module as they are.
names=include/jemalloc/internal/private_namespace.gen.h
: >$names
make -j"$(nproc)" -o $names lib/libjemalloc_pic.a \
  EXTRA_CFLAGS='-g0 -O2 -fno-unroll-loops -DJEMALLOC_NO_PRIVATE_NAMESPACE'
touch built
