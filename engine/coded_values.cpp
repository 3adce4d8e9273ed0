#include "engine/coded_values.hpp"

#include <cstring>
#include <string>
#include <vector>

namespace strata {
namespace {

std::size_t groups_of(Codes codes, std::size_t elements) {
  return codes == Codes::nf4_double ? ceil_div(elements, grain_of(codes)) : 0;
}

// Where what belongs to a piece lies: in its page, or among what a caller has.
template <class Byte>
struct At {
  Byte* codes;
  Byte* scales;
  Byte* groups;
};

template <class Byte>
At<Byte> in_page(const StoredForm& form, Byte* page, std::size_t page_bytes, std::size_t element) {
  const Packing packing = packing_of(form.codes, page_bytes);
  return {page + code_bytes(form.codes, element),
          page + packing.scales_at + scale_bytes(form.codes, element),
          page + packing.groups_at + element / grain_of(form.codes) * sizeof(ScaleGroup)};
}

// Null where the form has no such part.
template <class Byte>
Byte* ahead(std::span<Byte> part, std::size_t bytes) {
  return part.empty() ? nullptr : part.data() + bytes;
}

template <class Byte>
At<Byte> in_row(const StoredForm& form, const Stored<Byte>& some, std::size_t element) {
  return {ahead(some.codes, code_bytes(form.codes, element)),
          ahead(some.scales, scale_bytes(form.codes, element)),
          ahead(some.groups, element / grain_of(form.codes) * sizeof(ScaleGroup))};
}

template <class From>
void copy(const StoredForm& form, std::size_t elements, const At<From>& from,
          const At<std::byte>& to) {
  std::memcpy(to.codes, from.codes, code_bytes(form.codes, elements));
  std::memcpy(to.scales, from.scales, scale_bytes(form.codes, elements));
  const std::size_t groups = groups_of(form.codes, elements) * sizeof(ScaleGroup);
  if (groups != 0) std::memcpy(to.groups, from.groups, groups);
}

}  // namespace

const StoredForm& CodedValues::form_of(std::uint32_t param) const {
  base_.check_param(param);
  const ParamSpec& spec = base_.config.params[param];
  if (!spec.stored) refuse(spec.name + " does not rest as codes");
  return *spec.stored;
}

template <class Byte>
std::size_t CodedValues::check_sizes(std::uint32_t param, std::size_t first,
                                     const Stored<Byte>& some) const {
  const ParamSpec& spec = base_.config.params[param];
  const Codes codes = form_of(param).codes;
  const std::size_t count = some.codes.size() * (codes == Codes::int8 ? 1 : 2);
  if (first % grain_of(codes) != 0 || count % kCodeBlock != 0 || first > spec.numel ||
      count > spec.numel - first) {
    refuse("codes of elements " + std::to_string(first) + " to " + std::to_string(first + count) +
           " of " + spec.name + ", which has " + std::to_string(spec.numel) + " in blocks of " +
           std::to_string(grain_of(codes)));
  }
  const auto check = [&](const char* what, std::size_t given, std::size_t needed) {
    if (given == needed) return;
    refuse(std::to_string(count) + " elements of " + spec.name + " have " + std::to_string(needed) +
           " bytes of " + what + " as " + std::string(name(codes)) + ", and " +
           std::to_string(given) + " were given");
  };
  check("scales", some.scales.size(), scale_bytes(codes, count));
  check("groups of scales", some.groups.size(), groups_of(codes, count) * sizeof(ScaleGroup));
  return count;
}

// What a forward computes with does not change under it.
void CodedValues::check_left(std::uint32_t param) const {
  const ParamSpec& spec = base_.config.params[param];
  if (!prefetcher_.in_use(spec.unit)) return;
  refuse(spec.name + " cannot be written while " + base_.names.of(spec.unit) + " is entered");
}

template <class Work>
void CodedValues::for_pieces(Lock& lock, std::uint32_t param, std::size_t first, std::size_t count,
                             Intent intent, const Work& work) {
  for (const Piece& piece : base_.layout.pieces(param, first, count)) {
    const Chunk& chunk = base_.layout.chunks[piece.chunk];
    if (intent == Intent::read) {
      updates_.wait_settled(lock, piece.chunk);
    } else {
      if (!base_.owns.mine(piece.chunk)) continue;
      updates_.wait_writable(lock, piece.chunk);
    }
    const Pin pin = base_.open(lock, base_.page_of(chunk, Role::param, piece.in_chunk), intent);
    const Unlocked unlocked(lock);
    work(piece, pin.bytes());
  }
}

// What the device shows of the unit was computed from what was there before.
void CodedValues::forget_shown(Lock& lock, std::uint32_t param) {
  captures_.note_frozen_written();
  if (base_.remote) base_.renew_remote(lock, param);
  const UnitId unit = base_.config.params[param].unit;
  base_.gate.wait(lock, [&] { return prefetcher_.still() && !prefetcher_.in_use(unit); },
                  {"copies to the device, and who uses them,", unit});
  prefetcher_.evict(unit);
}

void CodedValues::quantise(Lock& lock, std::uint32_t param, const PlainValues& from) {
  const StoredForm& form = form_of(param);
  const ParamSpec& spec = base_.config.params[param];
  if (form.arithmetic != Arithmetic::bitsandbytes) {
    refuse(spec.name + " has the codes of torchao, which are read and not made here");
  }
  if (from.values == nullptr) refuse("no memory was given for values of " + spec.name);
  check_stored(form, spec.numel, from.row_elements);
  const CodeKernels& kernels = base_.decoder.kernels();
  std::vector<float> absmax;
  float offset = 0.0f;
  bool finite = false;
  {
    const Unlocked unlocked(lock);
    absmax.resize(spec.numel / kCodeBlock);
    finite = kernels.absmax(from.values, from.dtype, spec.numel, absmax.data());
    if (form.codes == Codes::int8) share_in_rows(absmax, from.row_elements);
    offset = from.offset ? *from.offset : mean_of(absmax);
  }
  if (!finite) {
    refuse(spec.name + " has a value that is infinite or not a number: it cannot be stored as " +
           std::string(name(form.codes)));
  }
  check_left(param);
  const auto* const values = static_cast<const std::byte*>(from.values);
  for_pieces(lock, param, 0, spec.numel, Intent::modify, [&](const Piece& piece, std::byte* page) {
    const CodeSpan span =
        base_.decoder.span(base_.layout.segment_of(param), piece.in_chunk, piece.count);
    kernels.quantise(span, values + piece.in_param * size_of(from.dtype), from.dtype,
                     absmax.data() + piece.in_param / kCodeBlock, offset, page);
  });
  forget_shown(lock, param);
}

void CodedValues::write(Lock& lock, std::uint32_t param, std::size_t first,
                        const Stored<const std::byte>& from) {
  const StoredForm& form = form_of(param);
  const std::size_t count = check_sizes(param, first, from), blocks = count / kCodeBlock;
  std::size_t bad = 0;
  {
    const Unlocked unlocked(lock);
    bad = first_bad_scale(form, from.scales.data(), from.groups.data(), blocks);
  }
  check_left(param);
  if (bad != blocks) {
    refuse(base_.config.params[param].name + ": the scale of its block " +
           std::to_string(first / kCodeBlock + bad) + " is infinite or not a number");
  }
  for_pieces(lock, param, first, count, Intent::modify, [&](const Piece& piece, std::byte* page) {
    copy(form, piece.count, in_row(form, from, piece.in_param - first),
         in_page(form, page, base_.layout.page_bytes, piece.in_chunk));
  });
  forget_shown(lock, param);
}

void CodedValues::read(Lock& lock, std::uint32_t param, std::size_t first,
                       const Stored<std::byte>& to) {
  const StoredForm& form = form_of(param);
  const std::size_t count = check_sizes(param, first, to);
  for_pieces(lock, param, first, count, Intent::read, [&](const Piece& piece, std::byte* page) {
    copy(form, piece.count, in_page(form, page, base_.layout.page_bytes, piece.in_chunk),
         in_row(form, to, piece.in_param - first));
  });
}

}  // namespace strata
