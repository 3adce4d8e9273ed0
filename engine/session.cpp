#include "engine/session.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "engine/pace.hpp"
#include "memory/check.hpp"
#include "offload/storage/make_engine.hpp"

namespace strata {
namespace {

constexpr std::uint32_t kTransfersMax = 64;
constexpr std::uint32_t kIoDepth = 64;
// See Note [Stuck].
constexpr auto kStuckAfter = std::chrono::minutes(2);
constexpr int kLooksMaxVirtual = 100'000;
// Several steps of a large model, a few MiB.
constexpr std::size_t kTimelineSpans = 1 << 14;

// Addresses that are kept free for host memory to grow: more than any machine has.
constexpr std::size_t kHostAddressesMax = std::size_t{1} << 44;

}  // namespace

Session::Session(const Config& config, SessionParts parts)
    : config_(config),
      home_(choose_residence(config)),
      kernels_(kernels(best_isa())),
      landed_(config.params.size(), 0),
      sum_squares_(config.params.size(), 0.0),
      waited_ns_(config.units.size(), 0),
      update_waits_(config.units.size(), 0),
      updated_(config.params.size(), false),
      written_(config.units.size(), false),
      timeline_(kTimelineSpans),
      look_period_(parts.look_period),
      looks_max_(parts.looks_max != 0 ? parts.looks_max
                 : parts.idle         ? kLooksMaxVirtual
                                      : static_cast<int>(kStuckAfter / parts.look_period)),
      idle_(std::move(parts.idle)),
      worker_is_done_(std::move(parts.worker_is_done)),
      turned_(std::move(parts.turned)) {
  for (const ParamSpec& spec : config_.params) group_of_.push_back(spec.group);
  try {
    claim(parts);
    start_workers(std::move(parts.foreign));
    build_core();
  } catch (...) {
    release_views();  // the backend does not know them
    throw;
  }
  if (!idle_) pump_ = std::thread([this] { pump(); });
}

void Session::claim(SessionParts& parts) {
  const std::size_t page = home_.layout.page_bytes;
  const std::size_t host_bytes = home_.host_frames * page;
  const std::size_t budget = std::min(config_.host_bytes, kHostAddressesMax) / page * page;
  slab_ = std::make_unique<Slab>(host_bytes, Locking::wanted, std::max(host_bytes, budget));
  host_ = std::make_unique<Pool>(home_.host_frames, page, slab_->bytes().data());
  OpenedDevice device{nullptr, std::move(parts.backend), nullptr};
  if (!device.backend) {
    // Every worker, and a gradient that lands meanwhile.
    device = parts.open_device
                 ? parts.open_device(&bell_)
                 : open_device(config_.device, &bell_, std::max(1, config_.workers) + 1);
  }
  driver_ = std::move(device.driver);
  backend_ = std::move(device.backend);
  compute_ = std::move(device.compute);
  STRATA_ASSERT(backend_->reachable() || (compute_ && home_.landing_frames != 0));
  claimed_ = home_.device_frames + home_.rest_frames;
  if (auto error = backend_->claim(claimed_, page)) throw StrataError(*error);
  pin(host_bytes);
  check_resting(home_);
  check_pinned(home_);
  for (const UnitLayout& unit : home_.layout.units) {
    views_.push_back(unit.pages.empty() ? nullptr : backend_->reserve(unit.pages.size() * page));
  }
  io_engine_ = std::move(parts.io_engine);
  if (home_.slots != 0) open_store(home_.slots);
}

void Session::open_store(std::uint32_t slots) {
  auto engine = std::move(io_engine_);
  if (!engine) engine = make_io_engine(config_.io_engine, &bell_, kIoDepth, &io_engine_why_);
  StoreOptions options;
  options.paths = config_.ssd_paths;
  options.slot_bytes = home_.layout.page_bytes;
  options.slot_count = slots;
  options.in_flight_max = kIoDepth;
  options.hash_threads = idle_ ? 0 : hash_threads_here();
  store_ = std::make_unique<Store>(options, std::move(engine), &bell_);
  store_->register_memory(slab_->bytes());
}

void Session::start_workers(Foreign foreign) {
  const int count = idle_ ? 0 : std::max(1, config_.workers);
  WorkerOptions options;
  options.foreign = std::move(foreign);
  if (compute_) {
    options.device_update = [this](std::span<const UpdateSpan> spans) {
      return compute_->update(spans);
    };
  }
  if (config_.pin_workers && count != 0) {
    options.placement =
        choose_placement(read_topology(), allowed_cpus(), config_.compute_threads, count);
  }
  workers_where_ = describe(options.placement);
  workers_ = std::make_unique<Workers>(count, &bell_, std::move(options));
}

void Session::build_core() {
  table_.add(home_.layout.page_count);
  std::vector<SlotId> slots(home_.layout.page_count, kNoSlot);
  for (std::uint32_t page = 0; page < home_.layout.page_count; ++page) {
    if (home_.tier[page] == Tier::ssd) slots[page] = store_->acquire().value();
  }
  mover_ = std::make_unique<Mover>(table_, *backend_, *host_, store_.get(), std::move(slots),
                                   kTransfersMax);
  // What is set aside goes first: the cache takes all the rest.
  for (std::uint32_t i = 0; i < home_.scale_frames + home_.landing_frames; ++i) {
    const auto frame = host_->acquire();
    STRATA_ASSERT(frame.has_value());
    STRATA_ASSERT(index(*frame) == i);  // the first ones, in a row
    if (i < home_.scale_frames) std::memset(host_->address(*frame), 0, home_.layout.page_bytes);
  }
  if (home_.scale_frames != 0) scales_ = host_->address(FrameId{0});
  if (home_.buffer_frames != 0) {
    gradients_ = std::make_unique<Gradients>(home_.layout, *host_, home_.buffer_frames);
  }
  cache_ = std::make_unique<HostCache>(table_, *mover_, *host_, home_.tier);
  std::vector<UnitPages> units;
  for (std::size_t u = 0; u < views_.size(); ++u) {
    units.push_back({home_.layout.units[u].pages, views_[u]});
  }
  const StagingShares shares = share_staging(home_);
  param_frames_ = static_cast<std::uint32_t>(
      std::min(config_.device_bytes / home_.layout.page_bytes, home_.layout.param_pages()));
  executor_ = std::make_unique<Executor>(table_, *mover_, *cache_, *backend_, std::move(units),
                                         param_frames_, shares.fetches);
  executor_->limit_frames(home_.device_frames);
  updates_ = std::make_unique<Updates>(Updates::Parts{.layout = home_.layout,
                                                      .config = config_,
                                                      .cache = *cache_,
                                                      .mover = *mover_,
                                                      .device = *backend_,
                                                      .executor = *executor_,
                                                      .workers = *workers_,
                                                      .timeline = timeline_,
                                                      .gradients = gradients_.get(),
                                                      .scales = scales_,
                                                      .worker_is_done = worker_is_done_},
                                       shares.chunks);
  for (std::uint32_t unit = 0; unit < home_.on_device.size(); ++unit) {
    if (home_.on_device[unit]) settle_on_device(UnitId{unit});
  }
  activations_ =
      std::make_unique<Activations>(*cache_, *backend_, timeline_, home_.layout.page_bytes);
}

Session::~Session() {
  close();
}

void Session::close() {
  {
    Lock lock(mutex_);
    if (closed_) return;
    closed_ = true;
    moved_.notify_all();
    moved_.wait(lock, [this] { return copying_ == 0; });
  }
  bell_.ring();
  if (pump_.joinable()) pump_.join();
  // Workers finish what they hold before the memory under them goes; the store and the backend
  // finish what is in flight when they are destroyed, before the slab.
  workers_.reset();
  updates_.reset();
  store_.reset();
  release_views();
  compute_.reset();
  backend_.reset();
  activations_.reset();
  slab_.reset();
}

void Session::release_views() {
  for (std::size_t u = 0; u < views_.size(); ++u) {
    if (views_[u] == nullptr) continue;
    backend_->release(views_[u], home_.layout.units[u].pages.size() * home_.layout.page_bytes);
  }
  views_.clear();
}

void Session::pump() {
  sleep_exactly();
  Pace pace(*backend_);
  for (std::chrono::nanoseconds sleep = kPumpPeriod;;) {
    const bool rang = bell_.wait(sleep);
    const Lock lock(mutex_);
    if (closed_) return;
    if (pace.wakes(rang)) {
      bool moved = false;
      while (!failure_ && turn()) moved = true;
      if (moved || failure_) moved_.notify_all();
    }
    sleep = pace.next();
  }
}

bool Session::turn() {
  arrivals_.clear();
  bool moved = mover_->turn(arrivals_);
  for (Arrival& arrival : arrivals_) {
    record(arrival);
    cache_->arrived(arrival);
    executor_->arrived(arrival);
    if (arrival.error) fail(std::move(*arrival.error));
  }
  if (!failure_) {
    moved |= updates_->turn();
    moved |= executor_->turn();
    moved |= activations_->turn();
    moved |= cache_->turn();
    moved |= std::erase_if(awaited_, [this](CopyTicket t) { return backend_->done(t); }) != 0;
  }
  if (executor_->failure()) fail(*executor_->failure());
  if (updates_->failure()) fail(*updates_->failure());
  heed_activations();
  if (moved) ++progress_;
  if (turned_) turned_(table_, home_);
  return moved;
}

void Session::fail(Error error) {
  if (failure_) return;
  if (error.page != kNoPage) error.unit = whose(error.page);
  failure_ = std::move(error);
}

void Session::throw_if_failed() const {
  if (failure_) throw StrataError(*failure_);
  throw_if_closed();
}

void Session::throw_if_closed() const {
  if (!closed_) return;
  Error error;
  error.fault = Fault::cancelled;
  error.what = "the session is closed: the model was unwrapped";
  throw StrataError(std::move(error));
}

// Note [Stuck]
// A wait for a disk or a link that hangs is to end. What counts are looks, not the clock: a process
// that is stopped (by SIGSTOP, a debugger, a container that is paused) looks at nothing, and a
// pause of any length is one look at most. Nor is a look in vain while the user's own optimizer
// runs on a worker: somebody may be debugging it.

// `ready` may act when it succeeds (open a page), so nobody asks it again after it said yes.
void Session::wait(Lock& lock, const std::function<bool()>& ready, const Awaited& awaited) {
  throw_if_failed();
  std::uint64_t seen = progress_;
  int looks = 0;  // in a row, at which nothing had moved
  while (!ready()) {
    const bool moved = turn();
    throw_if_failed();
    if (moved) {
      moved_.notify_all();  // what moved may be what another one waits for
      continue;
    }
    bool slept = true;
    if (idle_)
      idle_();
    else
      slept = moved_.wait_for(lock, look_period_) == std::cv_status::timeout;
    throw_if_failed();
    if (progress_ != seen || runs_foreign()) {
      seen = progress_;
      looks = 0;
    }
    looks += slept;
    if (looks < looks_max_) continue;
    fail(stuck(awaited));
    throw_if_failed();
  }
}

bool Session::runs_foreign() const {
  return workers_->thread_count() != 0 && workers_->in_flight() != 0 &&
         std::ranges::any_of(config_.groups,
                             [](const Hyper& group) { return group.rule == Rule::foreign; });
}

std::byte* Session::device_address(std::uint32_t param) const {
  const Lock lock(mutex_);
  throw_if_failed();
  check_param(param);
  const Place& place = home_.layout.places[param];
  const Segment& segment = home_.layout.segments[place.segment];
  return views_[index(segment.unit)] + segment.view_page * home_.layout.page_bytes +
         place.first * size_of(segment.dtype);
}

}  // namespace strata
