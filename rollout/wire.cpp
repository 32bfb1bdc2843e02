#include "rollout/wire.h"

#include "temper/v1/rollout.pb.h"

namespace temper::rollout {

void ToProto(const GenerateRequest& r, v1::GenerateRequest* out) {
  out->set_request_id(r.request_id);
  out->mutable_prompt_ids()->Assign(r.prompt_ids.begin(), r.prompt_ids.end());
  v1::Sampling* s = out->mutable_sampling();
  s->set_temperature(r.sampling.temperature);
  s->set_top_p(r.sampling.top_p);
  s->set_top_k(r.sampling.top_k);
  s->set_min_p(r.sampling.min_p);
  s->set_max_tokens(r.sampling.max_tokens);
  s->set_repetition_stop(r.sampling.repetition_stop);
  out->mutable_stop_ids()->Assign(r.stop_ids.begin(), r.stop_ids.end());
  v1::SampleKey* k = out->mutable_key();
  k->set_seed(r.key.seed);
  k->set_domain(r.key.domain);
  k->set_a(r.key.a);
  k->set_b(r.key.b);
  k->set_call(r.key.call);
  k->set_choice(r.key.choice);
  out->set_coalesce_ms(r.coalesce_ms);
}

GenerateRequest FromProto(const v1::GenerateRequest& in) {
  GenerateRequest r;
  r.request_id = in.request_id();
  r.prompt_ids.assign(in.prompt_ids().begin(), in.prompt_ids().end());
  r.sampling = {.temperature = in.sampling().temperature(),
                .top_p = in.sampling().top_p(),
                .top_k = in.sampling().top_k(),
                .min_p = in.sampling().min_p(),
                .max_tokens = in.sampling().max_tokens(),
                .repetition_stop = in.sampling().repetition_stop()};
  r.stop_ids.assign(in.stop_ids().begin(), in.stop_ids().end());
  r.key = {.seed = in.key().seed(), .domain = in.key().domain(), .a = in.key().a(), .b = in.key().b(), .call = in.key().call(), .choice = in.key().choice()};
  r.coalesce_ms = in.coalesce_ms();
  return r;
}

void ToProto(const Chunk& c, v1::GenerateChunk* out) {
  out->mutable_ids()->Assign(c.ids.begin(), c.ids.end());
  out->mutable_logprobs()->Assign(c.logprobs.begin(), c.logprobs.end());
  out->mutable_kept()->Assign(c.kept.begin(), c.kept.end());
  out->mutable_version()->set_epoch(c.version.epoch);
  out->mutable_version()->set_step(c.version.step);
  out->set_mixed(c.mixed);
  out->set_finish(c.finish);
  out->set_prompt_tokens(c.prompt_tokens);
  out->set_cached_tokens(c.cached_tokens);
  out->set_ids_hash(c.ids_hash);
}

Chunk FromProto(const v1::GenerateChunk& in) {
  Chunk c;
  c.ids.assign(in.ids().begin(), in.ids().end());
  c.logprobs.assign(in.logprobs().begin(), in.logprobs().end());
  c.kept.assign(in.kept().begin(), in.kept().end());
  c.version = {in.version().epoch(), in.version().step()};
  c.mixed = in.mixed();
  c.finish = in.finish();
  c.prompt_tokens = in.prompt_tokens();
  c.cached_tokens = in.cached_tokens();
  c.ids_hash = in.ids_hash();
  return c;
}

}  // namespace temper::rollout
