// Readers lag, and snapshots are taken between a backward and its step: what was merged is there
// once, with the gradient of the earlier step in it, and what waits says of which step it is.
TEST(Snapshots, OfMergedGradientsHaveAllThatIsNotApplied) {
  for (const std::uint32_t staleness : {1U, 3U}) {
    TempFolder folder;
    Config config = small_config(folder.path());
    config.update = UpdateMode::lock_free;
    config.max_staleness = staleness;
    config.accumulate = true;
    config.host_bytes = 120 * kPage;
    config.groups[0].rule = Rule::sgd;
    config.groups[0].lr = 1.0;
    Session session(config);
    const std::vector<float> zeros(kNumel);
    for (std::uint32_t p = 0; p < kUnits * kParamsEach; ++p) {
      session.write(p, Kind::master, 0, zeros.data(), kNumel);
    }
    std::vector<std::uint16_t> gradient(kNumel, 0xbf80);  // -1
    for (int step = 1; step <= 12; ++step) {
      for (std::uint32_t u = kUnits; u-- > 0;) {
        session.enter(UnitId{u}, true);
        for (std::uint32_t p = u * kParamsEach; p < (u + 1) * kParamsEach; ++p) {
          if (step % 3 != 0 || p % 2 == 0) {
            session.land_gradient(p, gradient.data(), Dtype::bfloat16);
          }
        }
        session.leave(UnitId{u});
      }
      session.reserve_snapshots(1);
      const std::uint64_t id = session.begin_snapshot(1);
      session.step(session.config().groups, {});
      const Snapshot snapshot = session.snapshot(id);
      const Layout layout = session.residence().layout;
      EXPECT_EQ(snapshot.step, step - 1);
      const int file = open(swap_files(folder.path()).at(0).c_str(), O_RDONLY | O_CLOEXEC);
      const auto value_at = [&](SlotId slot, std::size_t byte, std::size_t bytes) {
        std::uint32_t bits = 0;
        const auto at = static_cast<off_t>(index(slot) * kPage + byte);
        EXPECT_EQ(pread(file, &bits, bytes, at), static_cast<ssize_t>(bytes));
        return std::bit_cast<float>(bytes == 2 ? bits << 16 : bits);
      };
      for (const SavedRun& run : snapshot.runs) {
        const Chunk& chunk = layout.chunks[run.chunk];
        const Spot spot = layout.spot(chunk, Role::param, run.in_chunk);
        float total = 0.0f;  // of the parameter, and what is not applied of its gradient
        for (const SavedPage& saved : snapshot.pages) {
          if (saved.page == spot.page) total += value_at(saved.slot, spot.byte, 2);
        }
        const std::size_t per_page = layout.elements_per_page(chunk, Role::grad);
        for (const SavedFrame& saved : snapshot.frames) {
          if (saved.chunk != run.chunk || saved.number != run.in_chunk / per_page) continue;
          if (run.gradient == HeldGradient::none) continue;
          total -= value_at(saved.slot, run.in_chunk % per_page * 4, 4);
        }
        const int landed = run.param % 2 == 0 ? step : step - step / 3;
        EXPECT_EQ(total, static_cast<float>(landed))
            << "parameter " << run.param << ", step " << step << ", staleness " << staleness;
        const bool of_now = step % 3 != 0 || run.param % 2 == 0;
        EXPECT_EQ(of_now, run.gradient == HeldGradient::landed ||
                              run.gradient == HeldGradient::merged);
        if (run.gradient == HeldGradient::waiting) {
          EXPECT_EQ(snapshot.hypers.at(run.hyper).lr, 1.0);
        }
      }
      close(file);
      session.drop_snapshot(id);
    }
    session.drain();
    std::vector<float> values(kNumel);
    for (std::uint32_t p = 0; p < kUnits * kParamsEach; ++p) {
      session.read(p, Kind::master, 0, values.data(), kNumel);
      EXPECT_EQ(values[0], p % 2 == 0 ? 12.0f : 8.0f) << "parameter " << p;
    }
  }
}

