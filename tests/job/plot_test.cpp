// The picture of `temper plot`, read back as XML: where its marks are, against the numbers they stand for.
#include "job/plot.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <boost/property_tree/ptree.hpp>
#include <boost/property_tree/xml_parser.hpp>
#include <cstdio>
#include <functional>
#include <sstream>

#include "common/file.h"
#include "common/strings.h"
#include "job/curves.h"

namespace temper::job {
namespace {

using Tree = boost::property_tree::ptree;

Tree Read(const std::string& svg) {
  Tree tree;
  std::istringstream in(svg);
  boost::property_tree::read_xml(in, tree);
  return tree.get_child("svg");
}
std::string Attribute(const Tree& element, const std::string& name) { return element.get<std::string>("<xmlattr>." + name, ""); }
double Number(const Tree& element, const std::string& name) { return element.get<double>("<xmlattr>." + name); }

Tree Panel(const Tree& svg, const std::string& id) {
  for (const auto& [tag, element] : svg) {
    if (tag == "g" && Attribute(element, "id") == id) return element;
  }
  return {};
}
std::vector<Tree> Marks(const Tree& panel, const std::string& kind) {
  std::vector<Tree> marks;
  for (const auto& [tag, element] : panel) {
    if (Attribute(element, "class") == kind) marks.push_back(element);
  }
  return marks;
}
std::vector<std::pair<double, double>> Points(const Tree& line) {
  std::vector<std::pair<double, double>> points;
  for (const std::string& pair : Split(Attribute(line, "points"), ' ')) {
    double x = 0, y = 0;
    EXPECT_EQ(std::sscanf(pair.c_str(), "%lf,%lf", &x, &y), 2) << pair;
    points.emplace_back(x, y);
  }
  return points;
}
std::vector<std::string> Texts(const Tree& tree) {
  std::vector<std::string> texts;
  for (const auto& [tag, element] : tree) {
    if (tag == "text") texts.push_back(element.data());
    for (std::string& text : Texts(element)) texts.push_back(std::move(text));
  }
  return texts;
}
bool Has(const std::vector<std::string>& texts, const std::string& text) {
  return std::find(texts.begin(), texts.end(), text) != texts.end();
}

struct Frame {
  explicit Frame(const Tree& panel) {
    const Tree rect = Marks(panel, "frame").at(0);
    x = Number(rect, "x"), y = Number(rect, "y"), w = Number(rect, "width"), h = Number(rect, "height");
  }
  double x, y, w, h;
};

Curve FourSteps() {
  Curve curve;
  curve.name = "four";
  curve.run = true;
  curve.points = {{1, 0.0, 10, 0, {}, 1000}, {2, 0.25, 20, 1, 100, 1000}, {3, 0.5, 50, 1, 100, 2000}, {4, 1.0, 100, 2, 50, 1000}};
  curve.evaluations = {{0, 0, 0.125}, {4, 100, 0.875}};
  curve.staleness_bound = 2;
  return curve;
}

// An axis could run the wrong way, or scale marks of one panel by the range of another.
TEST(Plot, MarksStandWhereTheirNumbersSay) {
  const Curve curve = FourSteps();
  const Tree svg = Read(PlotSvg({curve}, {.window = 2}));
  EXPECT_EQ(Number(svg, "width"), 900);
  for (const bool by_step : {true, false}) {
    const Tree panel = Panel(svg, by_step ? "reward-step" : "reward-seconds");
    const Frame frame(panel);
    const std::vector<Tree> dots = Marks(panel, "step");
    ASSERT_EQ(dots.size(), 4u);
    // Rewards within [0, 1] have the axis 0..1; the last step and its reward 1 are the corner on the right above.
    EXPECT_NEAR(Number(dots[3], "cx"), frame.x + frame.w, 0.06);
    EXPECT_NEAR(Number(dots[3], "cy"), frame.y, 0.06);
    for (size_t i = 0; i < 4; ++i) {
      const double share = by_step ? static_cast<double>(curve.points[i].step) / 4 : curve.points[i].wall_s / 100;
      EXPECT_NEAR(Number(dots[i], "cx"), frame.x + frame.w * share, 0.06) << i;
      EXPECT_NEAR(Number(dots[i], "cy"), frame.y + frame.h * (1 - curve.points[i].reward), 0.06) << i;
    }
    const std::vector<Tree> diamonds = Marks(panel, "evaluation");
    ASSERT_EQ(diamonds.size(), 2u);
    double x = 0, y = 0;  // of the upper corner, half a diamond above the value
    ASSERT_EQ(std::sscanf(Attribute(diamonds[1], "d").c_str(), "M%lf %lf", &x, &y), 2);
    EXPECT_NEAR(x, frame.x + frame.w, 0.06);
    EXPECT_NEAR(y + 5.5, frame.y + frame.h * 0.125, 0.06);
    EXPECT_TRUE(Has(Texts(panel), "0.125"));
    EXPECT_TRUE(Has(Texts(panel), "0.875"));
  }
  const Frame stale(Panel(svg, "staleness"));
  const auto line = Points(Marks(Panel(svg, "staleness"), "staleness").at(0));
  ASSERT_EQ(line.size(), 4u);
  EXPECT_NEAR(line[3].second, stale.y + stale.h * (1 - 2 / 2.5), 0.06);
  EXPECT_NEAR(Points(Marks(Panel(svg, "staleness"), "bound").at(0)).at(1).second, line[3].second, 0.06);
  // Logarithmic from 10 to 10,000: a hundred is a third of the way.
  const Frame speed(Panel(svg, "speed"));
  const auto sampled = Points(Marks(Panel(svg, "speed"), "sample").at(0)),
             trained = Points(Marks(Panel(svg, "speed"), "train").at(0));
  ASSERT_EQ(sampled.size(), 3u);
  EXPECT_NEAR(sampled[0].second, speed.y + speed.h * 2 / 3, 0.06);
  EXPECT_NEAR(trained[0].second, speed.y + speed.h / 3, 0.06);
  // Beside another run there is no room for either.
  const Tree two = Read(PlotSvg({curve, curve}, {}));
  EXPECT_TRUE(Panel(two, "speed").empty());
  EXPECT_EQ(Marks(Panel(two, "reward-step"), "step").size(), 8u);
}

// A mean of fewer steps could pass for a mean of the window, or lag by one.
TEST(Plot, MeansOfWholeWindows) {
  const Tree svg = Read(PlotSvg({FourSteps()}, {.window = 2}));
  const Tree panel = Panel(svg, "reward-step");
  const Frame frame(panel);
  const auto means = Points(Marks(panel, "mean").at(0));
  ASSERT_EQ(means.size(), 3u);
  const double expected[] = {0.125, 0.375, 0.75};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(means[i].first, frame.x + frame.w * static_cast<double>(i + 2) / 4, 0.06);
    EXPECT_NEAR(means[i].second, frame.y + frame.h * (1 - expected[i]), 0.06);
  }
  EXPECT_TRUE(Marks(Panel(Read(PlotSvg({FourSteps()}, {.window = 5})), "reward-step"), "mean").empty());
}

// A name could break the picture, or two labels lie upon each other.
TEST(Plot, NamesAreEscapedAndLabelsKeepApart) {
  Curve a = FourSteps(), b = FourSteps();
  a.name = "<script>&\"'\x01";
  b.name = "bad \xff bytes";
  const std::string svg = PlotSvg({a, b}, {});
  EXPECT_EQ(svg.find("<script"), std::string::npos);
  const Tree tree = Read(svg);
  EXPECT_TRUE(Has(Texts(tree), "<script>&\"'?"));
  EXPECT_TRUE(Has(Texts(tree), "bad ? bytes"));
  // The two runs have the same evaluations: four labels, at four places.
  std::vector<std::pair<double, double>> places;
  for (const Tree& label : Marks(Panel(tree, "reward-step"), "value")) {
    for (const auto& [x, y] : places) EXPECT_TRUE(std::abs(x - Number(label, "x")) > 25 || std::abs(y - Number(label, "y")) > 11);
    places.emplace_back(Number(label, "x"), Number(label, "y"));
  }
  EXPECT_EQ(places.size(), 4u);
  // More runs than colours, and long names: each still has its own line and lies within the picture.
  std::vector<Curve> many(9, FourSteps());
  for (size_t i = 0; i < many.size(); ++i) many[i].name = std::to_string(i) + std::string(200, 'n');
  EXPECT_EQ(Marks(Panel(Read(PlotSvg(many, {.window = 1})), "reward-step"), "mean").size(), 9u);
}

// A range of nothing could divide by zero.
TEST(Plot, EmptyAndOneStepRuns) {
  Curve curve;
  curve.name = "new";
  curve.run = true;
  std::string svg = PlotSvg({curve}, {});
  EXPECT_TRUE(Has(Texts(Panel(Read(svg), "reward-step")), "no step yet"));
  curve.points = {{1, 0.5, 3, 0, {}, {}}};
  svg += PlotSvg({curve}, {.window = 1});
  const Tree panel = Panel(Read(PlotSvg({curve}, {.window = 1})), "reward-step");
  EXPECT_EQ(Marks(panel, "step").size(), 1u);
  EXPECT_EQ(Marks(panel, "mean").size(), 1u);
  // Rewards below 0 and above 1 widen the axis to round ends.
  curve.points = {{1, -0.7, 3, 0, {}, {}}, {2, 2.3, 3, 0, {}, {}}};
  svg += PlotSvg({curve}, {});
  const Tree wide = Panel(Read(PlotSvg({curve}, {})), "reward-step");
  for (const Tree& dot : Marks(wide, "step")) {
    EXPECT_GT(Number(dot, "cy"), Frame(wide).y);
    EXPECT_LT(Number(dot, "cy"), Frame(wide).y + Frame(wide).h);
  }
  for (const char* bad : {"nan", "inf"}) EXPECT_EQ(svg.find(bad), std::string::npos) << bad;
}

TEST(Plot, TicksAreRound) {
  EXPECT_EQ(RoundTicks(0, 60, 12), (std::vector<double>{0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60}));
  EXPECT_EQ(RoundTicks(0, 335, 6), (std::vector<double>{0, 50, 100, 150, 200, 250, 300}));
  const std::vector<double> fine = RoundTicks(0, 1, 5);
  ASSERT_EQ(fine.size(), 6u);
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(fine[i], 0.2 * static_cast<double>(i), 1e-12);
}

class Curves : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "curves-" + std::to_string(getpid());
    ASSERT_TRUE(MakeDirs(folder_).ok());
  }
  void TearDown() override { EXPECT_TRUE(RemoveAll(folder_).ok()); }
  void Write(const std::string& file, const std::string& text) { ASSERT_TRUE(WriteFile(folder_ + "/" + file, text).ok()); }
  std::string folder_;
};

// A resumed run could go back in time, a step that got no reward count as zero, a half-written line end the picture.
TEST_F(Curves, ARunFolder) {
  Write("plan.json", R"({"pool":{"bound":3}})");
  Write(
      "metrics.jsonl",
      R"({"step":1,"reward_mean":0.5,"wall_s":40,"staleness_max":1,"tokens_trained":90,"logical_tokens":300,"forward_s":1,"backward_s":1,"optimizer_s":1})"
      "\n"
      R"({"step":2,"reward_mean":0.75,"wall_s":50,"tokens_trained":90})"
      "\n"
      R"({"step":3,"reward_mean":null,"wall_s":55})"
      "\n"
      R"({"step":4,"reward_mean":1,"wall_s":8,"tokens_trained":90})"
      "\n"
      R"({"step":5,"rew)");
  Write("eval.jsonl", R"({"version":0,"pass_rate":0.25})"
                      "\n"
                      R"({"version":4,"pass_rate":0.1})"
                      "\n"
                      R"({"version":4,"pass_rate":0.75})"
                      "\n");
  const Curve curve = ReadCurve("mine=" + folder_ + "/").value();
  EXPECT_EQ(curve.name, "mine");
  EXPECT_EQ(ReadCurve(folder_)->name, BaseName(folder_));
  ASSERT_EQ(curve.points.size(), 3u);
  EXPECT_EQ(curve.points[0].train_tokens_per_s, 100);
  EXPECT_EQ(curve.points[0].staleness, 1);
  EXPECT_FALSE(curve.points[0].sample_tokens_per_s);
  EXPECT_EQ(curve.points[1].sample_tokens_per_s, 9);
  EXPECT_EQ(curve.points[2].step, 4);
  EXPECT_EQ(curve.points[2].wall_s, 58);
  EXPECT_FALSE(curve.points[2].sample_tokens_per_s);
  ASSERT_EQ(curve.evaluations.size(), 2u);
  EXPECT_EQ(curve.evaluations[0].wall_s, 37) << "not before the trainer waited for its first step";
  EXPECT_EQ(curve.evaluations[1].value, 0.75);
  EXPECT_EQ(curve.evaluations[1].wall_s, 58);
  EXPECT_EQ(curve.staleness_bound, 3);
}

// The evaluation behind a long warm-up stood at 0 s, and a resumed run's curve ended before the run did.
TEST_F(Curves, MarksStandAtTheTimeOfTheJob) {
  Write("sft.jsonl", R"({"step":1,"wall_s":30})"
                     "\n"
                     R"({"step":2,"wall_s":60})"
                     "\n");
  // Two starts, each with a trainer of its own; the second began after 100 s of the job.
  Write("metrics.jsonl", R"({"step":1,"reward_mean":0.5,"wall_s":90,"job_s":91,"wait_s":5})"
                         "\n"
                         R"({"step":2,"reward_mean":0.5,"wall_s":8,"job_s":108.5,"tokens_trained":90})"
                         "\n"
                         R"({"step":3,"reward_mean":0.5,"wall_s":18,"job_s":118.5,"tokens_trained":90})"
                         "\n");
  Write("eval.jsonl", R"({"version":0,"pass_rate":0.25,"wall_s":15,"job_s":77})"
                      "\n"
                      R"({"version":3,"pass_rate":0.75,"wall_s":12,"job_s":131})"
                      "\n");
  Curve curve = ReadCurve(folder_).value();
  ASSERT_EQ(curve.points.size(), 3u);
  EXPECT_EQ(curve.points[0].wall_s, 91);
  EXPECT_EQ(curve.points[1].wall_s, 108.5);
  EXPECT_EQ(curve.points[2].wall_s, 118.5);
  EXPECT_FALSE(curve.points[1].sample_tokens_per_s);
  EXPECT_EQ(curve.points[2].sample_tokens_per_s, 9);
  ASSERT_EQ(curve.evaluations.size(), 2u);
  EXPECT_EQ(curve.evaluations[0].wall_s, 77);
  EXPECT_EQ(curve.evaluations[1].wall_s, 131);

  // Recorded before there was a time of the job: behind the warm-up, behind the step.
  Write("metrics.jsonl", R"({"step":1,"reward_mean":0.5,"wall_s":90,"wait_s":5})"
                         "\n"
                         R"({"step":2,"reward_mean":0.5,"wall_s":98})"
                         "\n");
  Write("eval.jsonl", R"({"version":0,"pass_rate":0.25,"wall_s":15})"
                      "\n"
                      R"({"version":2,"pass_rate":0.75,"wall_s":12})"
                      "\n");
  curve = ReadCurve(folder_).value();
  EXPECT_EQ(curve.points[1].wall_s, 98);
  ASSERT_EQ(curve.evaluations.size(), 2u);
  EXPECT_EQ(curve.evaluations[0].wall_s, 75);
  EXPECT_EQ(curve.evaluations[1].wall_s, 110);
  // Such a run that goes on now: later steps know their time.
  Write("metrics.jsonl", R"({"step":1,"reward_mean":0.5,"wall_s":90})"
                         "\n"
                         R"({"step":2,"reward_mean":0.5,"wall_s":8,"job_s":120})"
                         "\n");
  curve = ReadCurve(folder_).value();
  EXPECT_EQ(curve.points[0].wall_s, 90);
  EXPECT_EQ(curve.points[1].wall_s, 120);
}

// Another system's numbers could be drawn although they are not what they are taken for.
TEST_F(Curves, BadFilesAreNamed) {
  const std::string good = R"({"step":1,"reward_mean":0.5,"wall_s":4,"more":[]})" "\n";
  Write("good.jsonl", good + R"({"step":3,"reward_mean":1,"wall_s":4})");
  EXPECT_EQ(ReadCurve("a=b=" + folder_ + "/good.jsonl").ok(), false);
  EXPECT_EQ(ReadCurve(folder_ + "/good.jsonl")->points.size(), 2u);
  for (const auto& [text, message] :
       {std::pair<std::string, std::string>{"", "no lines"},
        {"step,reward\n", "line 1: "},
        {good + "[1]\n", "line 2: no object"},
        {good + R"({"step":2,"wall_s":5})", "line 2: no number \"reward_mean\""},
        {good + R"({"step":2,"reward_mean":"high","wall_s":5})", "line 2: no number \"reward_mean\""},
        {good + R"({"step":2,"reward_mean":1})", "line 2: no number \"wall_s\""},
        {good + good, "line 2: step 1 after step 1"},
        {R"({"step":1.5,"reward_mean":1,"wall_s":1})", "\"step\" is not a whole number"},
        {R"({"step":1,"reward_mean":1,"wall_s":-1})", "\"wall_s\" is negative"},
        {good + R"({"step":2,"reward_mean":1,"wall_s":3})", "\"wall_s\" is less than"}}) {
    Write("bad.jsonl", text);
    auto curve = ReadCurve("x=" + folder_ + "/bad.jsonl");
    ASSERT_FALSE(curve.ok()) << text;
    EXPECT_NE(curve.status().message().find("bad.jsonl"), std::string::npos) << curve.status().message();
    EXPECT_NE(curve.status().message().find(message), std::string::npos) << curve.status().message();
  }
}

}  // namespace
}  // namespace temper::job
