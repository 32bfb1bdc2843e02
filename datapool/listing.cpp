#include "datapool/listing.h"

#include <algorithm>
#include <map>
#include <optional>

#include "common/json.h"
#include "fmt/format.h"

namespace temper::datapool {
namespace {

struct GroupStory {
  std::string source;
  int64_t task = 0, version = 0;
  std::optional<int64_t> from, leased_step, consumed_step;
  std::string buried, retired;
  int64_t issued = 0, running = 0;
  std::map<std::string, int64_t> outcomes;
  double reward_sum = 0;
  int64_t rewards = 0;

  const char* State() const {
    if (!buried.empty()) return "tombstoned";
    if (consumed_step) return "consumed";
    if (leased_step) return "leased";
    return running > 0 ? "running" : "ready";
  }
};

}  // namespace

Result<std::vector<LedgerRecord>> ReadLedger(std::string_view ledger) {
  std::vector<LedgerRecord> out;
  while (true) {
    const size_t end = ledger.find('\n');
    if (end == std::string_view::npos) return out;
    Result<LedgerRecord> record = ParseLedger(ledger.substr(0, end));
    if (!record.ok()) return record.status().WithContext(fmt::format("line {}", out.size() + 1));
    out.push_back(*std::move(record));
    ledger.remove_prefix(end + 1);
  }
}

std::vector<std::string> ListGroups(const std::vector<LedgerRecord>& ledger) {
  std::map<int64_t, GroupStory> groups;
  for (const LedgerRecord& record : ledger) {
    const LedgerLine& l = record.line;
    GroupStory* g = l.group ? &groups[*l.group] : nullptr;
    switch (l.kind) {
      case LedgerLine::Kind::kAdmit:
        g->source = l.source;
        g->task = l.task.value_or(0);
        g->version = l.version_admitted.value_or(0);
        g->from = l.from;
        break;
      case LedgerLine::Kind::kIssue:
        ++g->issued;
        ++g->running;
        break;
      case LedgerLine::Kind::kOutcome:
        --g->running;
        ++g->outcomes[l.outcome];
        if (l.reward) {
          g->reward_sum += *l.reward;
          ++g->rewards;
        }
        break;
      case LedgerLine::Kind::kLease:
        for (int64_t member : l.groups) groups[member].leased_step = l.step;
        break;
      case LedgerLine::Kind::kRetire:
        for (int64_t member : l.groups) groups[member].retired = l.reason;
        break;
      case LedgerLine::Kind::kConsume: g->consumed_step = l.step; break;
      case LedgerLine::Kind::kTombstone: g->buried = l.reason; break;
      case LedgerLine::Kind::kRollback:
        for (auto& [number, story] : groups) {
          if (story.consumed_step && l.step && *story.consumed_step > *l.step) story.consumed_step.reset();
        }
        break;
      default: break;
    }
  }
  std::vector<std::string> out;
  for (const auto& [number, g] : groups) {
    JsonWriter w;
    w.BeginObject().Key("group").Int(number).Key("source").String(g.source).Key("task").Int(g.task).Key("version_admitted").Int(g.version);
    if (g.from) w.Key("from").Int(*g.from);
    w.Key("state").String(g.State());
    if (g.leased_step) w.Key("step").Int(*g.leased_step);
    if (!g.buried.empty()) w.Key("reason").String(g.buried);
    if (!g.retired.empty()) w.Key("records").String(g.retired == "drop" ? "dropped" : "archived");
    w.Key("attempts").Int(g.issued).Key("running").Int(g.running).Key("outcomes").BeginObject();
    for (const auto& [outcome, n] : g.outcomes) w.Key(outcome).Int(n);
    w.EndObject();
    if (g.rewards > 0) w.Key("reward_mean").Double(g.reward_sum / static_cast<double>(g.rewards));
    w.EndObject();
    out.push_back(w.Take());
  }
  return out;
}

Result<std::vector<std::string>> ExplainGroup(const std::vector<LedgerRecord>& ledger, int64_t group) {
  std::vector<std::string> out;
  int64_t step = -1;  // of its lease, as long as a commit or a rollback may still speak of it; -1 = none
  bool admitted = false;
  for (const LedgerRecord& record : ledger) {
    const LedgerLine& l = record.line;
    bool mine = l.group == group;
    admitted |= mine && l.kind == LedgerLine::Kind::kAdmit;
    if (l.kind == LedgerLine::Kind::kRetire && std::count(l.groups.begin(), l.groups.end(), group)) mine = true;
    if (l.kind == LedgerLine::Kind::kLease && std::count(l.groups.begin(), l.groups.end(), group)) {
      mine = true;
      step = l.step.value_or(-1);
    }
    if (step >= 0 && l.step && l.kind == LedgerLine::Kind::kRollback) mine = *l.step < step;
    if (step >= 0 && l.step && l.kind == LedgerLine::Kind::kCommit && *l.step >= step) {
      mine = true;
      step = -1;  // for good; later commits say nothing new of it
    }
    if (mine) out.push_back(PrintLedger(record));
  }
  if (!admitted) return NotFound(fmt::format("group {} was never admitted", group));
  return out;
}

}  // namespace temper::datapool
