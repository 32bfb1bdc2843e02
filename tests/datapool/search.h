// Every reachable situation of small pools.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <set>
#include <string>

#include "datapool/window.h"
#include "tests/datapool/script.h"

namespace temper::datapool {

// Dead positions behind a stuck head can pile up without end; so many are looked at.
struct SearchSize {
  int64_t slots_at_most;  // B
  int dead_at_most;
  size_t situations_at_most = 400'000;  // of one pool: more is taken for a key that grows without end
};

// A window and what of its history matters to the future, relative to the head and to the batch being filled: two situations
// with the same key can only go on in the same ways.
struct Situation {
  Window window;
  struct Member {
    char state = '?';  // running r, ready y, dead x, taken t
    int64_t version = 0;
    std::string source = {};
  };
  std::map<int64_t, Member> groups = {};  // from the heads on: of each source, from its own
  std::map<std::string, int64_t> have_of = {};
  int64_t batch = 0;                      // being filled
  int64_t have = 0;

  void See(const StepOutput& out, std::map<std::string, int64_t>* worst) {
    for (const Decision& d : out.decisions) {
      switch (d.kind) {
        case Decision::Kind::kAdmit: groups[*d.group] = {'r', *d.version, d.source}; break;
        case Decision::Kind::kReady: groups[*d.group].state = 'y'; break;
        case Decision::Kind::kTombstone: groups[*d.group].state = 'x'; break;
        case Decision::Kind::kTake:
          groups[*d.group].state = 't';
          ++have;
          ++have_of[groups[*d.group].source];
          (*worst)[groups[*d.group].source] = std::max((*worst)[groups[*d.group].source], *d.stale);
          break;
        case Decision::Kind::kLease:
          // Exactly each source's share, in every batch.
          for (size_t i = 0; i < window.plan().quota.size(); ++i) {
            EXPECT_EQ(have_of[SourceNames(window.config())[i]], window.plan().quota[i]);
          }
          ++batch;
          have = 0;
          have_of.clear();
          break;
        default: break;
      }
    }
    // What lies behind the head of its source has no further effect.
    std::set<std::string> alive;
    for (auto it = groups.begin(); it != groups.end();) {
      const bool gone = it->second.state == 'x' || it->second.state == 't';
      if (!gone) alive.insert(it->second.source);
      it = gone && !alive.count(it->second.source) ? groups.erase(it) : std::next(it);
    }
  }

  int Dead() const {
    int dead = 0;
    for (const auto& [number, g] : groups) dead += g.state == 'x';
    return dead;
  }

  std::string Key() const {
    std::string key = fmt::format("{} {} {} {};", window.asking(), have, window.Outstanding().size(), batch - window.version());
    for (const auto& [number, g] : groups) {
      if (g.source != "default") key += g.source;
      key += g.state;
      if (g.state == 'r' || g.state == 'y') key += fmt::format("{}", batch - g.version);
    }
    // How many of the batch being filled are of each source: what lies behind the heads no longer says it.
    for (const auto& [source, n] : have_of) key += fmt::format(" {}{}", source, n);
    return key;
  }
};

// The largest staleness in any reachable situation, of each source; empty when the search does not end.
inline std::map<std::string, int64_t> WorstOfEach(const PoolConfig& config, const SearchSize& size, size_t* situations) {
  std::map<std::string, int64_t> worst;
  std::set<std::string> seen;
  std::deque<Situation> frontier;
  auto reach = [&](Situation s) {
    if (seen.insert(s.Key()).second) frontier.push_back(std::move(s));
  };
  Situation first{Window(config)};
  first.See(first.window.Start(0), &worst);
  reach(std::move(first));
  while (!frontier.empty()) {
    Situation here = std::move(frontier.front());
    frontier.pop_front();
    std::vector<Event> events;
    for (const OpenRollout& open : here.window.Running()) {
      events.push_back(FinishEvent(open.id.group));
      if (here.Dead() < size.dead_at_most) events.push_back(FailEvent(open.id.group));
    }
    if (!here.window.asking() && static_cast<int64_t>(here.window.Outstanding().size()) < config.max_leases) events.push_back(Of(Event::Kind::kLease));
    if (!here.window.Outstanding().empty()) events.push_back(Of(Event::Kind::kUpdate, here.window.Outstanding().front()));
    for (const Event& e : events) {
      Situation next = here;
      Result<StepOutput> out = next.window.Apply(e, 0);
      EXPECT_TRUE(out.ok());
      next.See(*out, &worst);
      // Durable at once: the store form stays small, and nothing of it matters here.
      if (e.kind == Event::Kind::kUpdate) {
        EXPECT_TRUE(next.window.Apply(Of(Event::Kind::kCommit, next.window.version()), 0).ok());
      }
      reach(std::move(next));
      if (seen.size() > size.situations_at_most) {
        ADD_FAILURE() << "the search does not end";
        return {};
      }
    }
  }
  *situations = seen.size();
  return worst;
}

inline int64_t Worst(const PoolConfig& config, const SearchSize& size, size_t* situations) {
  return WorstOfEach(config, size, situations)["default"];
}

// The same for two sources: each keeps to its own bound and reaches it, whatever the other one does.
inline void ExpectBoundOfEachSource(const std::vector<std::vector<int64_t>>& quotas, int64_t S_at_most, const SearchSize& size) {
  size_t total = 0;
  int pools = 0;
  for (const std::vector<int64_t>& quota : quotas) {
    for (int64_t S = 0; S <= S_at_most; ++S) {
      for (int64_t wide = 0; wide < 4; ++wide) {
        for (int64_t leases = 1; leases <= 2; ++leases) {
          PoolConfig config;
          config.S = S;
          config.max_leases = leases;
          config.P = quota[0] + quota[1];
          for (int64_t i : {0, 1}) {
            SourceConfig& source = config.sources.emplace_back();
            source.name = i == 0 ? "a" : "b";
            source.weight = static_cast<double>(quota[static_cast<size_t>(i)]);
            source.window.emplace().policy = (wide >> i & 1) ? Policy::kGreedy : Policy::kStrict;
          }
          ASSERT_TRUE(Validate(config).ok());
          const PoolPlan plan = Plan(config);
          ASSERT_EQ(plan.quota, quota);
          size_t situations = 0;
          std::map<std::string, int64_t> worst = WorstOfEach(config, size, &situations);
          total += situations;
          ++pools;
          for (size_t i : {0, 1}) {
            const std::string what = fmt::format("quota {}+{} S {} wide {} leases {} source {}", quota[0], quota[1], S, wide, leases, i);
            EXPECT_LE(worst[config.sources[i].name], *plan.bounds[i]) << what;
            if (S == 0) {
              EXPECT_EQ(worst[config.sources[i].name], 0) << what;
            } else {
              EXPECT_EQ(worst[config.sources[i].name], *plan.bounds[i]) << what;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(total, 1000u);
  std::printf("%d pools of two sources, %zu situations\n", pools, total);
}

// The bound of docs/pool_sim.md 4 is never exceeded, and is reached.
inline void ExpectBound(const SearchSize& size) {
  size_t total = 0;
  int pools = 0;
  for (int64_t P = 1; P <= 3; ++P) {
    for (int64_t B = P; B <= size.slots_at_most; ++B) {
      for (int64_t W = 1; W <= B; ++W) {
        for (int64_t leases = 1; leases <= 2; ++leases) {
          PoolConfig config;
          config.P = P;
          config.B = B;
          config.window.size = W;
          config.max_leases = leases;
          ASSERT_TRUE(Validate(config).ok());
          size_t situations = 0;
          const int64_t worst = Worst(config, size, &situations);
          const int64_t bound = *Plan(config).bound;
          total += situations;
          ++pools;
          EXPECT_LE(worst, bound) << "P " << P << " B " << B << " W " << W << " leases " << leases;
          // With (S+1)·P slots it is reached; with one batch's worth of slots (S=0) a batch needs them all: 0.
          if (B == P) {
            EXPECT_EQ(worst, 0);
          }
          if (B % P == 0 && B > P) {
            EXPECT_EQ(worst, bound) << "P " << P << " B " << B << " W " << W << " leases " << leases;
          }
        }
      }
    }
  }
  EXPECT_GT(total, 1000u);
  std::printf("%d pools, %zu situations\n", pools, total);
}

}  // namespace temper::datapool
