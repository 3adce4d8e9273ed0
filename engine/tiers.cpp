#include "engine/tiers.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"
#include "offload/storage/make_engine.hpp"

namespace strata {
namespace {

constexpr std::uint32_t kIoDepth = 64;
// Addresses that are kept free for host memory to grow: more than any machine has.
constexpr std::size_t kHostAddressesMax = std::size_t{1} << 44;

std::size_t host_bytes_max(const Config& config, std::size_t page_bytes) {
  return std::min(config.host_bytes, kHostAddressesMax) / page_bytes * page_bytes;
}

OpenedDevice open(const Config& config, TierParts& parts, Doorbell* bell) {
  if (parts.device) return {nullptr, std::move(parts.device), nullptr};
  if (parts.open_device) return parts.open_device(bell);
  // Every worker, and a gradient that lands meanwhile.
  return open_device(config.device, bell, std::max(1, config.workers) + 1);
}

}  // namespace

Tiers::Tiers(const Config& config, const Residence& home, TierParts parts, Doorbell* bell)
    : config_(config),
      page_bytes_(home.layout.page_bytes),
      grad_pages_(home.layout.grad_pages),
      codes_(home.layout.computed_count != 0),
      bell_(bell),
      slab_(home.host_frames * page_bytes_, Locking::wanted,
            std::max(home.host_frames * page_bytes_, host_bytes_max(config, page_bytes_)),
            trains_alone(config) ? Sharing::none : Sharing::wanted),
      host_(home.host_frames, page_bytes_, slab_.bytes().data()),
      opened_(open(config, parts, bell)),
      device_frames_(home.device_frames + home.rest_frames),
      threads_(parts.threads),
      now_(std::move(parts.now)),
      io_engine_(std::move(parts.io_engine)) {
  STRATA_ASSERT(device().reachable() ||
                (compute() != nullptr && home.landing_frames + home.outbox_frames != 0));
  if (auto error = device().claim(device_frames_, page_bytes_)) throw StrataError(*error);
  const Pinned pinned = pin();
  pinned_ = pinned.bytes;
  check_resting(home);
  check_pinned(home, pinned);
  claim_slots(home.slots + home.kept_slots);
}

std::unique_ptr<IoEngine> Tiers::take_io_engine(std::string* why) {
  if (io_engine_) return std::move(io_engine_);
  return make_io_engine(config_.io_engine, bell_, kIoDepth, why);
}

void Tiers::claim_slots(std::uint32_t slots) {
  if (slots == 0) return;
  SlotGrowth growth = begin_growth(slots);
  grow_files(growth);
  end_growth(std::move(growth));
}

std::uint32_t Tiers::slots_beyond(std::uint32_t slots) const {
  const std::uint32_t there = ssd_->slot_count();
  return slots > there ? slots - there : 0;
}

Tiers::SlotGrowth Tiers::begin_growth(std::uint32_t slots) {
  opening_ = slots != 0 && ssd_ == nullptr;
  return {.slots = slots, .made = nullptr, .io_engine_why = {}};
}

void Tiers::grow_files(SlotGrowth& growth) {
  if (opening_)
    growth.made =
        make_store(take_io_engine(&growth.io_engine_why), config_.ssd_paths, growth.slots);
  else if (const std::uint32_t more = slots_beyond(growth.slots))
    ssd_->lengthen(more);
}

void Tiers::end_growth(SlotGrowth growth) {
  opening_ = false;
  if (growth.slots == 0) return;
  if (growth.made) {
    ssd_ = std::move(growth.made);
    io_engine_why_ = std::move(growth.io_engine_why);
  } else if (const std::uint32_t more = slots_beyond(growth.slots)) {
    ssd_->extend(more);
  }
}

std::uint32_t Tiers::prepare_files(const SavedFiles& saved, const Claims& claims) const {
  if (saved.files.size() != config_.ssd_paths.size()) refuse("each SSD path has one page file");
  const auto held = static_cast<std::uint32_t>(saved.slots.size());
  const std::uint64_t stripes = saved.files.size();
  const std::uint64_t needed =
      std::max<std::uint64_t>(round_up(std::uint64_t{held} + claims.slots, stripes), stripes);
  std::uint64_t bytes = needed * page_bytes_;
  for (const auto& file : saved.files) bytes = std::max(bytes, file->bytes() * stripes);
  if (bytes > config_.ssd_bytes) {
    refuse("the pages of the snapshot, with those that change, take " + bytes_text(bytes) +
           " of the SSD, and ssd= is " + bytes_text(config_.ssd_bytes));
  }
  fit_slots(saved, page_bytes_, static_cast<std::uint32_t>(needed));
  return held;
}

void Tiers::change_files(SavedFiles saved) {
  if (ssd_ != nullptr) {
    ssd_->change_files(std::move(saved));
  } else {
    ssd_ = std::make_unique<Store>(store_options(config_.ssd_paths, 1),
                                   take_io_engine(&io_engine_why_), std::move(saved), bell_);
    ssd_->warn(ssd_->register_memory(slab_.bytes()));
  }
}

StoreOptions Tiers::store_options(std::vector<std::string> paths, std::uint32_t slots) const {
  StoreOptions options;
  options.paths = std::move(paths);
  options.slot_bytes = page_bytes_;
  options.slot_count = slots;
  options.in_flight_max = kIoDepth;
  options.hash_threads = threads_ ? hash_threads_here() : 0;
  options.now = now_;
  return options;
}

std::unique_ptr<Store> Tiers::make_store(std::unique_ptr<IoEngine> engine,
                                         std::vector<std::string> paths, std::uint32_t slots) {
  auto store =
      std::make_unique<Store>(store_options(std::move(paths), slots), std::move(engine), bell_);
  store->warn(store->register_memory(slab_.claimed()));
  return store;
}

// The first bytes of host memory, as many as the system lets.
Pinned Tiers::pin() {
  return copies().pin_host(slab_.claimed());
}

bool Tiers::pinned(const std::byte* at, std::size_t bytes) const {
  return at + bytes <= slab_.bytes().data() + pinned_;
}

std::optional<Error> Tiers::pin_others(std::uint32_t rank, std::span<const std::byte> memory) {
  const Pinned pinned = copies().pin_others(memory);
  if (device().reachable() || !codes_ || pinned.bytes >= memory.size()) return std::nullopt;
  return Error{
      .fault = Fault::config,
      .what = codes_come_by("the memory of rank " + std::to_string(rank), pinned, memory.size()) +
              ", or take frozen=\"as-is\""};
}

void Tiers::set_device_frames(std::uint32_t frames) {
  device().set_frames(frames);
  device_frames_ = frames;
}

Tiers::Growth Tiers::begin_growth(const Claims& then, std::uint32_t device_frames) {
  STRATA_ASSERT(then.host_frames >= host_.capacity() && device_frames >= device_frames_);
  return {.then = then,
          .device_frames = device_frames,
          .pinned = {},
          .slots = begin_growth(then.slots + then.kept_slots)};
}

void Tiers::claim(Growth& growth) {
  try {
    slab_.claim(growth.then.host_frames * page_bytes_);
    growth.pinned = pin();
    check_pinned(growth.then, growth.pinned);
    if (auto error = device().claim_memory(growth.device_frames)) throw StrataError(*error);
    if (growth.slots.slots != 0) grow_files(growth.slots);
  } catch (...) {
    growth.slots.made.reset();  // it may have registered what goes
    device().give_back_memory();
    copies().pin_host(slab_.bytes());
    slab_.give_up();
    throw;
  }
}

std::span<std::byte> Tiers::end_growth(Growth growth) {
  const std::size_t before = slab_.bytes().size();
  slab_.extend();
  pinned_ = growth.pinned.bytes;
  set_device_frames(growth.device_frames);
  end_growth(std::move(growth.slots));
  host_.grow(growth.then.host_frames - host_.capacity());
  return slab_.bytes().subspan(before);
}

void Tiers::check_kept(const Claims& now, std::uint64_t slots) const {
  const std::uint64_t budget = config_.ssd_paths.empty() ? 0 : config_.ssd_bytes;
  const std::uint64_t needed = (now.slots + slots) * page_bytes_;
  if (needed <= budget) return;
  Error error;
  error.fault = Fault::config;
  error.what = "infeasible: snapshots need " + bytes_text(slots * page_bytes_) +
               " of the SSD beside " + bytes_text(now.slots * page_bytes_) +
               " for what rests there, and ssd= is " + bytes_text(budget) +
               (config_.ranks > 1 ? " for each rank" : "") + "; ssd=\"" +
               std::to_string(ceil_div(needed * config_.ranks, kMiB)) +
               "MiB\" would do, or a smaller keep=" +
               (config_.ssd_paths.empty() ? ", and ssd_path= is needed" : "");
  error.needed_bytes = needed;
  error.budget_bytes = budget;
  error.snapshot_bytes = slots * page_bytes_;
  error.would_do_bytes = needed;
  throw StrataError(std::move(error));
}

void Tiers::check_resting(const Residence& then) const {
  if (device().reachable() || then.rest_frames == 0) return;
  if (!compute()->reaches_host()) {
    refuse("units cannot rest on " + device().description() +
           ": its kernels do not reach host memory, where the sums of gradients go");
  }
  for (const ParamSpec& spec : config_.params) {
    if (!spec.trainable || !then.on_device[index(spec.unit)]) continue;
    if (config_.groups[spec.group].rule != Rule::foreign) continue;
    refuse(config_.units[index(spec.unit)] + " cannot rest on " + device().description() +
           ": its optimizer is a Python class, which computes on the processor");
  }
}

// A page of codes may be in any frame of host memory when its values are computed.
void Tiers::check_codes(const Pinned& pinned) const {
  const std::size_t bytes = slab_.claimed().size();
  if (!compute()->reaches_host()) {
    refuse("frozen= needs the kernels of " + device().description() +
           " to reach host memory, where codes come by: they do not; take frozen=\"as-is\"");
  }
  if (pinned.bytes >= bytes) return;
  refuse(codes_come_by("host memory", pinned, bytes) +
         ", or pass memory={\"host\": " + std::to_string(pinned.bytes) + "}");
}

std::string Tiers::codes_come_by(const std::string& where, const Pinned& pinned,
                                 std::size_t bytes) const {
  return "frozen= needs the kernels of " + device().description() + " to reach " + where +
         ", where codes come by: of " + bytes_text(bytes) + " " + bytes_text(pinned.bytes) +
         " could be pinned (the driver: " + pinned.why_not +
         "); raise the limit of locked memory (ulimit -l)";
}

// Likewise. Kernels reach pinned host memory by its own address: the sums of what lands, scales of
// moments, and gradients without pages, which may be in any frame.
void Tiers::check_pinned(const Claims& then, const Pinned& pinned) const {
  if (device().reachable()) return;
  if (codes_) check_codes(pinned);
  if (then.rest_frames == 0) return;
  const std::size_t first = std::size_t{then.scale_frames} + then.landing_frames;
  const std::size_t needed = grad_pages_ ? first * page_bytes_ : slab_.claimed().size();
  if (pinned.bytes >= needed) return;
  refuse("units cannot rest on " + device().description() + ": its kernels would use " +
         bytes_text(needed) + " of host memory, of which " + bytes_text(pinned.bytes) +
         " could be pinned; raise the limit of locked memory (ulimit -l)" +
         (grad_pages_ ? "" : ", or take update=\"on_step\", which needs little of it"));
}

}  // namespace strata
